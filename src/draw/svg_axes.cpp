#include "draw/svg_axes.h"

#include <algorithm>
#include <numeric>

#include "draw/downsample.h"
#include "draw/formatting.h"
#include "draw/svg_panel.h"
#include "index.h"
#include "text.h"

namespace weft::draw {
namespace {

constexpr double kStrip = 7, kGap = 3, kOut = kGap + kStrip;
constexpr Index kRuns = 10'000;  // with more, each would be far below a pixel
constexpr double kLeast = 0.05;  // pixels: narrower padding is not drawn

// One side of the matrix. Places along it are coordinates of the picture; distances are from the matrix, outwards.
struct Side {
  const Frame& frame;
  bool keys;

  double tokens() const { return static_cast<double>(keys ? frame.keys : frame.queries); }
  double first() const { return keys ? frame.box.x : frame.box.y; }
  double length() const { return keys ? frame.box.width : frame.box.height; }
  double depth() const { return keys ? frame.box.height : frame.box.width; }
  double along(double token) const { return keys ? frame.x(token) : frame.y(token); }
  Point at(double along, double distance) const {
    return keys ? Point{along, frame.box.y - distance} : Point{frame.box.x - distance, along};
  }
  Box strip(Index begin, Index end) const {
    const double from = along(static_cast<double>(begin)), size = along(static_cast<double>(end)) - from;
    const Point corner = at(from, kOut);
    return {corner.x, corner.y, keys ? size : kStrip, keys ? kStrip : size};
  }
};

// The strip along a side that shows which rank holds each token; grey: padding.
void draw_strip(const Layout& layout, const Side& side, SvgWriter& svg) {
  const Stream& stream = layout.stream();
  svg.box(side.strip(0, static_cast<Index>(side.tokens())), "wait");
  for (const auto& [rank, run] : holding(layout, kRuns).parts) {
    // Alternating tokens: one by one where they can be seen, else a sample of them.
    const Index step = run.stride == 1 ? run.count : max_of(1, run.count / 400);
    for (Index i = 0; i < run.count; i += step)
      svg.box(side.strip(run.token + i * run.stride, run.token + i * run.stride + step), weft::text("r", rank));
  }
  for (Index i = 0; i < stream.sequences(); ++i) {
    if (stream.used(i) == stream.padded(i)) continue;
    const Box b = side.strip(stream.offset(i) + stream.used(i), stream.offset(i + 1));
    if ((side.keys ? b.width : b.height) >= kLeast) svg.box(b, "padding");
  }
}

void draw_ticks(const Side& side, SvgWriter& svg) {
  const double widest = text_width(grouped(static_cast<Index>(side.tokens()))) + 12;
  const double step = std::max(round_step(side.tokens() * (side.keys ? widest : 24) / side.length()), 1.0);
  const double middle = side.length() / side.tokens() >= 7 ? 0.5 : 0;
  for (double t = 0; t + (side.keys ? step * 0.25 : 0) < side.tokens(); t += step) {
    const std::string said = grouped(static_cast<Index>(t));
    const double place = side.along(t + middle), half = text_width(said) / 2;
    svg.line(side.at(place, kOut + 4), side.at(place, kOut));
    if (side.keys)
      svg.label(side.at(std::clamp(place, side.first() + half, side.first() + side.length() - half), kOut + 6), said,
                "small mid");
    else
      svg.label(side.at(place + (t == 0 && middle == 0 ? 7 : 3.5), kOut + 6), said, "small end");
  }
}

// Edges through the whole picture where documents are few, else marks at the side.
void draw_edges(const Stream& stream, const Side& side, SvgWriter& svg) {
  const bool few = stream.sequences() <= 16;
  double drawn = side.first();
  for (Index i = 1; i < stream.sequences(); ++i) {
    const double edge = side.along(static_cast<double>(stream.offset(i)));
    if (edge - drawn < 2.5 || stream.padded(i) == 0) continue;
    drawn = edge;
    svg.line(side.at(edge, kOut), side.at(edge, few ? -side.depth() : kGap));
  }
}

// Names of documents, the largest first, where no other name is in the way.
void name_documents(const Stream& stream, const Side& side, SvgWriter& svg) {
  std::vector<Index> order(at(stream.sequences()));
  std::iota(order.begin(), order.end(), Index{0});
  std::sort(order.begin(), order.end(), [&](Index a, Index b) {
    return stream.padded(a) != stream.padded(b) ? stream.padded(a) > stream.padded(b) : a < b;
  });
  const double scale = side.length() / side.tokens();
  std::vector<std::pair<double, double>> taken;
  for (const Index i : order) {
    const double size = static_cast<double>(stream.padded(i)) * scale;
    if (size < 10) break;
    const std::string whole = "document " + std::to_string(i);
    const std::string said = text_width(whole) <= size - 6 ? whole : "doc " + std::to_string(i);
    const double half = text_width(said) / 2 + 4, least = side.first() + half - 4,
                 greatest = side.first() + side.length() - half + 4;
    const double middle =
        std::min(std::max(side.along(static_cast<double>(stream.offset(i))) + size / 2, least), greatest);
    if (std::any_of(taken.begin(), taken.end(),
                    [&](const auto& t) { return middle - half < t.second && middle + half > t.first; }))
      continue;
    taken.emplace_back(middle - half, middle + half);
    svg.label(side.at(middle, side.keys ? kOut + 19 : 73), said, "small quiet mid", side.keys ? 0 : -90);
  }
}

}  // namespace

void draw_axis(const Layout& layout, const Frame& frame, bool keys, SvgWriter& svg) {
  const Side side{frame, keys};
  draw_strip(layout, side, svg);
  draw_edges(layout.stream(), side, svg);
  name_documents(layout.stream(), side, svg);
  draw_ticks(side, svg);
}

}  // namespace weft::draw
