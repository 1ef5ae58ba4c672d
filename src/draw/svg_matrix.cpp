#include <algorithm>
#include <cmath>
#include <map>

#include "draw/svg_parts.h"
#include "draw/written.h"
#include "text.h"

namespace weft::draw {
namespace {

constexpr double kStrip = 7, kGap = 3;
constexpr Index kCells = 128;  // up to so many tokens cells are drawn one by one
constexpr std::size_t kPolygons = 20'000;

// Where tokens lie in the picture.
struct Frame {
  Box box;
  Index queries = 1, keys = 1;

  double x(double key) const { return box.x + box.width * key / static_cast<double>(keys); }
  double y(double query) const { return box.y + box.height * query / static_cast<double>(queries); }
};

using Polygon = std::vector<Point>;

// Keeps the part where side(point) >= 0.
template <class Side>
Polygon cut(const Polygon& in, const Side& side) {
  Polygon out;
  for (std::size_t i = 0; i < in.size(); ++i) {
    const Point &a = in[i], &b = in[(i + 1) % in.size()];
    const double da = side(a), db = side(b);
    if (da >= 0) out.push_back(a);
    if ((da < 0) != (db < 0)) {
      const double share = da / (da - db);
      out.push_back({a.x + (b.x - a.x) * share, a.y + (b.y - a.y) * share});
    }
  }
  return out;
}

// x: keys, y: queries. The middle of a row's cells decides where its band ends.
Polygon polygon(const Slice& s) {
  const auto at = [](Index v) { return static_cast<double>(v); };
  Polygon p = {{at(s.k_begin), at(s.q_begin)},
               {at(s.k_end), at(s.q_begin)},
               {at(s.k_end), at(s.q_end)},
               {at(s.k_begin), at(s.q_end)}};
  if (!is_unlimited(s.hi)) p = cut(p, [&](const Point& c) { return c.y + at(s.hi) + 0.5 - c.x; });
  if (!is_unlimited(s.lo)) p = cut(p, [&](const Point& c) { return c.x - (c.y + at(s.lo) - 0.5); });
  return p;
}

void add(const Frame& frame, const Polygon& polygon, std::string& path) {
  for (std::size_t i = 0; i < polygon.size(); ++i)
    path += weft::text(i == 0 ? "M" : "L", decimal(frame.x(polygon[i].x)), " ", decimal(frame.y(polygon[i].y)));
  if (!polygon.empty()) path += 'Z';
}

// A slice of one rank's queries and one rank's keys, with the runs that its rows lie in.
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

// All of them, or none if they are too many for a picture.
std::vector<Piece> pieces_of(const Problem& problem, const Layouts& layouts) {
  std::vector<Piece> pieces;
  std::vector<std::vector<Run>> k_runs;
  for (Index k = 0; k < layouts.k.ranks(); ++k) k_runs.push_back(layouts.k.runs(k).runs());
  for (Index q = 0; q < layouts.q.ranks(); ++q) {
    const std::vector<Run> q_runs = layouts.q.runs(q).runs();
    for (Index k = 0; k < layouts.k.ranks(); ++k) {
      for (const Slice& given : make_plan(problem, layouts.q.runs(q), layouts.k.runs(k)).slices) {
        const Slice s = trimmed(given, true);
        const Run *rows = run_of(q_runs, s.q_begin), *keys = run_of(k_runs[static_cast<std::size_t>(k)], s.k_begin);
        if (rows != nullptr && keys != nullptr) pieces.push_back({q, k, s, *rows, *keys});
        if (pieces.size() > kPolygons) return {};
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

// Each cell by itself, or a row's cells at once where they are neighbours.
void add_cells(const Frame& frame, const Piece& p, std::string& path) {
  const auto token = [](const Run& run, Index row) { return run.token + (row - run.row) * run.stride; };
  const auto rectangle = [&](Index q, Index k0, Index k1) {
    path +=
        weft::text("M", decimal(frame.x(static_cast<double>(k0))), " ", decimal(frame.y(static_cast<double>(q))), "H",
                   decimal(frame.x(static_cast<double>(k1))), "V", decimal(frame.y(static_cast<double>(q + 1))), "H",
                   decimal(frame.x(static_cast<double>(k0))), "Z");
  };
  const Slice& s = p.slice;
  for (Index q = s.q_begin; q < s.q_end; ++q) {
    for (Index k = s.k_begin; k < s.k_end; ++k) {
      if (sees(s, q, k)) rectangle(token(p.q, q), token(p.k, k), token(p.k, k) + 1);
    }
  }
}

void draw_strip(const Layout& layout, const Frame& frame, bool keys, Ink& ink) {
  const Stream& stream = layout.stream();
  const auto place = [&](double begin, double end) {
    return keys ? Box{frame.x(begin), frame.box.y - kGap - kStrip, frame.x(end) - frame.x(begin), kStrip}
                : Box{frame.box.x - kGap - kStrip, frame.y(begin), kStrip, frame.y(end) - frame.y(begin)};
  };
  ink.box(place(0, static_cast<double>(keys ? frame.keys : frame.queries)), "wait");
  std::vector<std::string> paths(static_cast<std::size_t>(layout.ranks()));
  const auto mark = [&](Index rank, Index begin, Index end) {
    const Box b = place(static_cast<double>(begin), static_cast<double>(end));
    paths[static_cast<std::size_t>(rank)] += weft::text("M", decimal(b.x), " ", decimal(b.y), "h", decimal(b.width),
                                                        "v", decimal(b.height), "h", decimal(-b.width), "Z");
  };
  for (Index r = 0; r < layout.ranks(); ++r) {
    for (const Run& run : layout.runs(r).runs()) {
      if (run.stride == 1) {
        mark(r, run.token, run.token + run.count);
        continue;
      }
      // Alternating tokens: one by one where they can be seen, else a sample of them.
      const Index step = max_of(1, run.count / 400);
      for (Index i = 0; i < run.count; i += step)
        mark(r, run.token + i * run.stride, run.token + i * run.stride + step);
    }
  }
  for (std::size_t r = 0; r < paths.size(); ++r)
    if (!paths[r].empty()) ink.path(paths[r], weft::text("r", r));
  // Padding over it.
  std::string padding;
  for (Index i = 0; i < stream.sequences(); ++i) {
    if (stream.used(i) == stream.padded(i)) continue;
    const Box b =
        place(static_cast<double>(stream.offset(i) + stream.used(i)), static_cast<double>(stream.offset(i + 1)));
    padding += weft::text("M", decimal(b.x), " ", decimal(b.y), "h", decimal(b.width), "v", decimal(b.height), "h",
                          decimal(-b.width), "Z");
  }
  if (!padding.empty()) ink.path(padding, "wait");
}

void draw_ticks(const Frame& frame, bool keys, Ink& ink) {
  const double tokens = static_cast<double>(keys ? frame.keys : frame.queries),
               length = keys ? frame.box.width : frame.box.height;
  const double widest = text_width(grouped(static_cast<Index>(tokens))) + 12;
  const double step = std::max(round_step(tokens * (keys ? widest : 24) / length), 1.0);
  const double middle = length / tokens >= 7 ? 0.5 : 0;
  const double side = kGap + kStrip;
  for (double t = 0; t + (keys ? step * 0.25 : 0) < tokens; t += step) {
    const std::string said = grouped(static_cast<Index>(t));
    if (keys) {
      const double x = frame.x(t + middle);
      ink.line({x, frame.box.y - side - 4}, {x, frame.box.y - side}, "edge");
      const double half = text_width(said) / 2, right = frame.box.x + frame.box.width - half;
      ink.label({std::clamp(x, frame.box.x + half, right), frame.box.y - side - 6}, said, "small mid");
    } else {
      const double y = frame.y(t + middle);
      ink.line({frame.box.x - side - 4, y}, {frame.box.x - side, y}, "edge");
      ink.label({frame.box.x - side - 6, y + (t == 0 && middle == 0 ? 7 : 3.5)}, said, "small end");
    }
  }
}

// Edges through the whole picture where documents are few, else marks at the side.
void draw_edges(const Stream& stream, const Frame& frame, bool keys, Ink& ink) {
  const double side = kGap + kStrip;
  const bool few = stream.sequences() <= 16;
  double drawn = keys ? frame.box.x : frame.box.y;
  for (Index i = 1; i < stream.sequences(); ++i) {
    const double token = static_cast<double>(stream.offset(i)), at = keys ? frame.x(token) : frame.y(token);
    if (at - drawn < 2.5 || stream.padded(i) == 0) continue;
    drawn = at;
    if (keys)
      ink.line({at, frame.box.y - side}, {at, few ? frame.box.y + frame.box.height : frame.box.y - kGap}, "edge");
    else
      ink.line({frame.box.x - side, at}, {few ? frame.box.x + frame.box.width : frame.box.x - kGap, at}, "edge");
  }
}

// Names of documents, the largest first, where no other name is in the way.
void name_documents(const Stream& stream, const Frame& frame, bool keys, Ink& ink) {
  std::vector<Index> order;
  for (Index i = 0; i < stream.sequences(); ++i) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](Index a, Index b) { return stream.padded(a) > stream.padded(b); });
  const double first = keys ? frame.box.x : frame.box.y, length = keys ? frame.box.width : frame.box.height;
  const double scale = length / static_cast<double>(keys ? frame.keys : frame.queries);
  std::vector<std::pair<double, double>> taken;
  for (const Index i : order) {
    const double size = static_cast<double>(stream.padded(i)) * scale;
    if (size < 10) break;
    const std::string whole = "document " + std::to_string(i);
    const std::string said = text_width(whole) <= size - 6 ? whole : "doc " + std::to_string(i);
    const double half = text_width(said) / 2 + 4, least = first + half - 4, greatest = first + length - half + 4;
    const double at =
        std::min(std::max(first + static_cast<double>(stream.offset(i)) * scale + size / 2, least), greatest);
    if (std::any_of(taken.begin(), taken.end(),
                    [&](const auto& t) { return at - half < t.second && at + half > t.first; }))
      continue;
    taken.emplace_back(at - half, at + half);
    if (keys)
      ink.label({at, frame.box.y - kGap - kStrip - 19}, said, "small quiet mid");
    else
      ink.label({frame.box.x - 73, at}, said, "small quiet mid", -90);
  }
}

}  // namespace

void draw_matrix(const Scene& scene, const Panel& panel, const Box& box, Ink& ink) {
  const Packing& packing = scene.subject.problem.packing();
  const Frame frame{box, max_of(packing.q().tokens(), 1), max_of(packing.k().tokens(), 1)};
  ink.box(box, "empty");
  const bool strided = panel.layouts.q.rank_order().stride() != 1;
  const bool cells = max_of(frame.queries, frame.keys) <= kCells;
  const Index inside = panel.inside, groups = panel.layouts.q.ranks() / inside;
  const auto step = [&](const Piece& p) {
    const Index q = p.rank_q / inside, k = p.rank_k / inside;
    const bool near = static_cast<Index>(panel.step_of.size()) == groups;
    return panel.step_of[static_cast<std::size_t>(near ? (q - k + groups) % groups : q * groups + k)];
  };
  std::vector<Piece> pieces;
  if (!strided || cells) pieces = pieces_of(scene.subject.problem, panel.layouts);
  std::map<std::string, std::string> paths;  // by class
  for (const Piece& p : pieces) {
    const std::string colour = scene.subject.by_step ? weft::text("s", max_of(step(p), 0))
                                                     : weft::text(p.rank_q == p.rank_k ? "r" : "p", p.rank_q);
    if (cells)
      add_cells(frame, p, paths[colour]);
    else
      add(frame, polygon(in_tokens(p)), paths[colour]);
  }
  if (pieces.empty())
    for (const Slice& s : scene.mask) add(frame, polygon(trimmed(s, true)), paths["mixed"]);
  for (const auto& [colour, path] : paths) ink.path(path, colour + (cells ? " cell" : " area"));
  draw_strip(panel.layouts.q, frame, false, ink);
  draw_strip(panel.layouts.k, frame, true, ink);
  for (const bool keys : {false, true}) {
    const Stream& stream = keys ? packing.k() : packing.q();
    draw_edges(stream, frame, keys, ink);
    name_documents(stream, frame, keys, ink);
  }
  draw_ticks(frame, false, ink);
  draw_ticks(frame, true, ink);
  ink.box(box, "frame");
  if (pieces.empty() && strided)
    ink.label({box.x + box.width - 8, box.y + 18}, "ranks alternate token by token", "small quiet end");
}

}  // namespace weft::draw
