#include <algorithm>

#include "draw/downsample.h"
#include "draw/svg_axes.h"
#include "draw/svg_panel.h"
#include "index.h"
#include "text.h"

namespace weft::draw {
namespace {

constexpr Index kCells = 128;  // up to so many tokens every cell is a rectangle of its own
constexpr Index kPolygons = 20'000;

using Polygon = std::vector<Point>;

// The part of a polygon where side(point) >= 0.
template <class Side>
Polygon cut(const Polygon& in, const Side& side) {
  Polygon out;
  for (std::size_t i = 0; i < in.size(); ++i) {
    const Point &a = in[i], &b = in[(i + 1) % in.size()];
    const double da = side(a), db = side(b);
    if (da >= 0) out.push_back(a);
    if ((da < 0) != (db < 0)) {
      const double t = da / (da - db);
      out.push_back({a.x + (b.x - a.x) * t, a.y + (b.y - a.y) * t});
    }
  }
  return out;
}

// x: keys, y: queries. The band ends half a cell beyond the middles of its last cells, so that edges are straight.
Polygon polygon(const Slice& s) {
  const auto real = [](Index v) { return static_cast<double>(v); };
  Polygon p = {{real(s.k_begin), real(s.q_begin)},
               {real(s.k_end), real(s.q_begin)},
               {real(s.k_end), real(s.q_end)},
               {real(s.k_begin), real(s.q_end)}};
  if (!is_unlimited(s.hi)) p = cut(p, [&](const Point& c) { return c.y + real(s.hi) + 0.5 - c.x; });
  if (!is_unlimited(s.lo)) p = cut(p, [&](const Point& c) { return c.x - (c.y + real(s.lo) - 0.5); });
  return p;
}

void add(const Frame& frame, const Polygon& polygon, const std::string& classes, SvgWriter& svg) {
  std::string path;
  for (std::size_t i = 0; i < polygon.size(); ++i)
    path += weft::text(i == 0 ? "M" : "L", decimal(frame.x(polygon[i].x)), " ", decimal(frame.y(polygon[i].y)));
  if (!polygon.empty()) svg.path(path + 'z', classes);
}

// A slice between one rank's queries and one rank's keys, and the runs that hold its rows.
struct Piece {
  Index rank_q = 0, rank_k = 0;
  Slice slice;
  Run q, k;
};

const Run* run_of(const std::vector<Run>& runs, Index row) {
  for (const Run& r : runs)
    if (row >= r.row && row < r.row + r.count) return &r;
  return nullptr;
}

// All pieces, or none if there are too many for a picture.
std::vector<Piece> pieces_of(const Problem& problem, const Layouts& layouts) {
  std::vector<Piece> pieces;
  std::vector<std::vector<Run>> k_runs;
  for (Index k = 0; k < layouts.k.ranks(); ++k) k_runs.push_back(layouts.k.runs(k).runs());
  for (Index q = 0; q < layouts.q.ranks(); ++q) {
    const std::vector<Run> q_runs = layouts.q.runs(q).runs();
    for (Index k = 0; k < layouts.k.ranks(); ++k) {
      for (const Slice& given : make_plan(problem, layouts.q.runs(q), layouts.k.runs(k)).slices) {
        const Slice s = trimmed(given, true);
        const Run *rows = run_of(q_runs, s.q_begin), *keys = run_of(k_runs[at(k)], s.k_begin);
        if (rows != nullptr && keys != nullptr) pieces.push_back({q, k, s, *rows, *keys});
        if (static_cast<Index>(pieces.size()) > kPolygons) return {};
      }
    }
  }
  return pieces;
}

Slice in_tokens(const Piece& p) {
  const Index q = p.q.token - p.q.row, k = p.k.token - p.k.row;
  return {p.slice.q_begin + q,
          p.slice.q_end + q,
          p.slice.k_begin + k,
          p.slice.k_end + k,
          shift_bound(p.slice.lo, k - q),
          shift_bound(p.slice.hi, k - q)};
}

// A rectangle for each visible pair.
void add_cells(const Frame& frame, const Piece& p, const std::string& classes, SvgWriter& svg) {
  const auto token = [](const Run& run, Index row) { return run.token + (row - run.row) * run.stride; };
  const Slice& s = p.slice;
  for (Index q = s.q_begin; q < s.q_end; ++q) {
    for (Index k = s.k_begin; k < s.k_end; ++k) {
      if (sees(s, q, k))
        svg.box({frame.x(static_cast<double>(token(p.k, k))), frame.y(static_cast<double>(token(p.q, q))),
                 frame.x(1) - frame.x(0), frame.y(1) - frame.y(0)},
                classes);
    }
  }
}

}  // namespace

void draw_matrix(const Figure& figure, const Panel& panel, const Box& box, SvgWriter& svg) {
  const Packing& packing = figure.subject.problem.packing();
  const Frame frame{box, max_of(packing.q().tokens(), 1), max_of(packing.k().tokens(), 1)};
  svg.box(box, "empty");
  const bool strided = panel.layouts.q.rank_order().stride() != 1;
  const bool cells = max_of(frame.queries, frame.keys) <= kCells;
  const Index ulysses = panel.ulysses, groups = panel.layouts.q.ranks() / ulysses;
  const auto step = [&](const Piece& p) {
    const Index q = p.rank_q / ulysses, k = p.rank_k / ulysses;
    const bool near = static_cast<Index>(panel.step_of.size()) == groups;
    return panel.step_of[at(near ? (q - k + groups) % groups : q * groups + k)];
  };
  std::vector<Piece> pieces;
  if (!strided || cells) pieces = pieces_of(figure.subject.problem, panel.layouts);
  for (const Piece& p : pieces) {
    const std::string colour = figure.subject.by_step ? weft::text("s", max_of(step(p), 0))
                                                      : weft::text(p.rank_q == p.rank_k ? "r" : "p", p.rank_q);
    if (cells)
      add_cells(frame, p, colour + " cell", svg);
    else
      add(frame, polygon(in_tokens(p)), colour + " area", svg);
  }
  if (pieces.empty())
    for (const Slice& s : bundled(figure.mask, kPolygons).slices)
      add(frame, polygon(trimmed(s, true)), "mixed area", svg);
  draw_axis(panel.layouts.q, frame, false, svg);
  draw_axis(panel.layouts.k, frame, true, svg);
  svg.box(box, "frame");
  if (pieces.empty() && strided)
    svg.label({box.x + box.width - 8, box.y + 18}, "ranks alternate token by token", "small quiet end");
}

}  // namespace weft::draw
