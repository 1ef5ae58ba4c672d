#include "draw/svg_axes.h"

#include <algorithm>
#include <cmath>

#include "draw/downsample.h"
#include "draw/formatting.h"
#include "draw/svg_panel.h"
#include "index.h"
#include "text.h"

namespace weft::draw {
namespace {

constexpr double kStrip = 7, kGap = 3;
constexpr Index kRuns = 10'000;  // with more, each would be far below a pixel
constexpr double kLeast = 0.05;  // pixels: narrower padding is not drawn

// The strip along a side that shows which rank holds each token; grey: padding.
void draw_strip(const Layout& layout, const Frame& frame, bool keys, SvgWriter& svg) {
  const Stream& stream = layout.stream();
  const auto place = [&](double begin, double end) {
    return keys ? Box{frame.x(begin), frame.box.y - kGap - kStrip, frame.x(end) - frame.x(begin), kStrip}
                : Box{frame.box.x - kGap - kStrip, frame.y(begin), kStrip, frame.y(end) - frame.y(begin)};
  };
  svg.box(place(0, static_cast<double>(keys ? frame.keys : frame.queries)), "wait");
  const auto mark = [&](Index rank, Index begin, Index end) {
    svg.box(place(static_cast<double>(begin), static_cast<double>(end)), weft::text("r", rank));
  };
  for (const auto& [rank, run] : holding(layout, kRuns).parts) {
    if (run.stride == 1) {
      mark(rank, run.token, run.token + run.count);
      continue;
    }
    // Alternating tokens: one by one where they can be seen, else a sample of them.
    const Index step = max_of(1, run.count / 400);
    for (Index i = 0; i < run.count; i += step)
      mark(rank, run.token + i * run.stride, run.token + i * run.stride + step);
  }
  for (Index i = 0; i < stream.sequences(); ++i) {
    if (stream.used(i) == stream.padded(i)) continue;
    const Box b =
        place(static_cast<double>(stream.offset(i) + stream.used(i)), static_cast<double>(stream.offset(i + 1)));
    if ((keys ? b.width : b.height) >= kLeast) svg.box(b, "padding");
  }
}

void draw_ticks(const Frame& frame, bool keys, SvgWriter& svg) {
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
      svg.line({x, frame.box.y - side - 4}, {x, frame.box.y - side});
      const double half = text_width(said) / 2, right = frame.box.x + frame.box.width - half;
      svg.label({std::clamp(x, frame.box.x + half, right), frame.box.y - side - 6}, said, "small mid");
    } else {
      const double y = frame.y(t + middle);
      svg.line({frame.box.x - side - 4, y}, {frame.box.x - side, y});
      svg.label({frame.box.x - side - 6, y + (t == 0 && middle == 0 ? 7 : 3.5)}, said, "small end");
    }
  }
}

// Edges through the whole picture where documents are few, else marks at the side.
void draw_edges(const Stream& stream, const Frame& frame, bool keys, SvgWriter& svg) {
  const double side = kGap + kStrip;
  const bool few = stream.sequences() <= 16;
  double drawn = keys ? frame.box.x : frame.box.y;
  for (Index i = 1; i < stream.sequences(); ++i) {
    const double token = static_cast<double>(stream.offset(i)), edge = keys ? frame.x(token) : frame.y(token);
    if (edge - drawn < 2.5 || stream.padded(i) == 0) continue;
    drawn = edge;
    if (keys)
      svg.line({edge, frame.box.y - side}, {edge, few ? frame.box.y + frame.box.height : frame.box.y - kGap});
    else
      svg.line({frame.box.x - side, edge}, {few ? frame.box.x + frame.box.width : frame.box.x - kGap, edge});
  }
}

// Names of documents, the largest first, where no other name is in the way.
void name_documents(const Stream& stream, const Frame& frame, bool keys, SvgWriter& svg) {
  std::vector<Index> order;
  for (Index i = 0; i < stream.sequences(); ++i) order.push_back(i);
  std::sort(order.begin(), order.end(), [&](Index a, Index b) {
    return stream.padded(a) != stream.padded(b) ? stream.padded(a) > stream.padded(b) : a < b;
  });
  const double first = keys ? frame.box.x : frame.box.y, length = keys ? frame.box.width : frame.box.height;
  const double scale = length / static_cast<double>(keys ? frame.keys : frame.queries);
  std::vector<std::pair<double, double>> taken;
  for (const Index i : order) {
    const double size = static_cast<double>(stream.padded(i)) * scale;
    if (size < 10) break;
    const std::string whole = "document " + std::to_string(i);
    const std::string said = text_width(whole) <= size - 6 ? whole : "doc " + std::to_string(i);
    const double half = text_width(said) / 2 + 4, least = first + half - 4, greatest = first + length - half + 4;
    const double middle =
        std::min(std::max(first + static_cast<double>(stream.offset(i)) * scale + size / 2, least), greatest);
    if (std::any_of(taken.begin(), taken.end(),
                    [&](const auto& t) { return middle - half < t.second && middle + half > t.first; }))
      continue;
    taken.emplace_back(middle - half, middle + half);
    if (keys)
      svg.label({middle, frame.box.y - kGap - kStrip - 19}, said, "small quiet mid");
    else
      svg.label({frame.box.x - 73, middle}, said, "small quiet mid", -90);
  }
}

}  // namespace

void draw_axis(const Layout& layout, const Frame& frame, bool keys, SvgWriter& svg) {
  draw_strip(layout, frame, keys, svg);
  draw_edges(layout.stream(), frame, keys, svg);
  name_documents(layout.stream(), frame, keys, svg);
  draw_ticks(frame, keys, svg);
}

}  // namespace weft::draw
