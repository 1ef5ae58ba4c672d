#include <algorithm>
#include <cmath>

#include "draw/formatting.h"
#include "draw/svg_panel.h"
#include "index.h"
#include "text.h"

namespace weft::draw {
namespace {

constexpr Index kListed = 16;  // ranks that get a line each
constexpr double kLine = 15;

double work(const Figure& figure, const RankLoad& r) {
  return static_cast<double>(r.pair_heads) / static_cast<double>(figure.subject.heads_q);
}

std::string time_text(double t) {
  if (t == 0) return "0";
  const double scale = t >= 1 ? 1 : t >= 1e-3 ? 1e3 : 1e6;
  return weft::text(decimal(t * scale, 2), t >= 1 ? " s" : t >= 1e-3 ? " ms" : " µs");
}

}  // namespace

double text_width(std::string_view text) {
  const auto letters = std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
  return 5.9 * static_cast<double>(letters);
}

double round_step(double least) {
  const double power = std::pow(10, std::floor(std::log10(least)));
  for (const double n : {1.0, 2.0, 5.0}) {
    if (n * power >= least * 0.999999) return n * power;
  }
  return 10 * power;
}

Scales scales_of(const Figure& figure) {
  Scales scales;
  for (const Panel& p : figure.panels) {
    for (const RankLoad& r : p.ranks) {
      scales.work = std::max(scales.work, work(figure, r));
      scales.bytes = std::max(scales.bytes, static_cast<double>(r.forward.bytes_received + r.backward.bytes_received));
    }
    scales.time = std::max(scales.time, p.times.forward.seconds);
  }
  return scales;
}

double draw_bars(const Figure& figure, const Panel& panel, const Scales& scales, Point from, double width,
                 SvgWriter& svg) {
  const Index ranks = static_cast<Index>(panel.ranks.size()), shown = min_of(ranks, kListed);
  const double left = from.x + 36, half = (width - 36) / 2, bar = half - 84, bytes_left = left + half + 4;
  svg.label({left - 8, from.y}, "rank", "small quiet end");
  svg.label({left, from.y}, "visible pairs", "small quiet");
  svg.label({bytes_left, from.y}, "bytes in: forward, backward", "small quiet");
  for (Index i = 0; i < shown; ++i) {
    const Index rank = i * ranks / shown;
    const RankLoad& r = panel.ranks[at(rank)];
    const double y = from.y + 6 + kLine * static_cast<double>(i), pairs = work(figure, r);
    const auto part = [](double value, double of, double length) { return of > 0 ? value / of * length : 0; };
    const double forward = static_cast<double>(r.forward.bytes_received),
                 backward = static_cast<double>(r.backward.bytes_received);
    svg.label({left - 8, y + 9}, std::to_string(rank), "small end");
    svg.box({left, y, part(pairs, scales.work, bar), 11}, weft::text("r", rank));
    svg.label({left + part(pairs, scales.work, bar) + 4, y + 9}, short_number(pairs), "small");
    const double first = part(forward, scales.bytes, bar - 22), second = part(backward, scales.bytes, bar - 22);
    svg.box({bytes_left, y, first, 11}, weft::text("r", rank));
    svg.box({bytes_left + first, y, second, 11}, weft::text("p", rank));
    svg.label({bytes_left + first + second + 4, y + 9}, weft::text(bytes_text(forward), ", ", bytes_text(backward)),
              "small");
  }
  if (shown < ranks)
    svg.label({left, from.y + 18 + kLine * static_cast<double>(shown)}, weft::text(shown, " of ", ranks, " ranks"),
              "small quiet");
  return 12 + kLine * static_cast<double>(shown) + (shown < ranks ? 16 : 0);
}

double draw_timeline(const Panel& panel, const Scales& scales, Point from, double width, SvgWriter& svg) {
  const Timelines& times = panel.times;
  const std::vector<RankTimeline>& detail = times.forward.detail;
  const Index ranks = static_cast<Index>(detail.size()), shown = min_of(ranks, kListed);
  const double left = from.x + 36, length = width - 36 - 6, end = scales.time > 0 ? scales.time : 1;
  const double high = shown <= 8 ? 17 : 12, lane = high + 3, split = high * 0.62;
  const auto x = [&](double t) { return left + t / end * length; };
  svg.label({left - 8, from.y}, "rank", "small quiet end");
  const Index all = panel.layouts.q.ranks();
  const std::string part = shown > 0 && shown < all ? weft::text(", ", shown, " of ", all, " ranks") : "";
  svg.label({left, from.y}, weft::text("forward, ", times.about, part), "small quiet");
  for (Index i = 0; i < shown; ++i) {
    const RankTimeline& line = detail[at(i * ranks / shown)];
    const double y = from.y + 6 + lane * static_cast<double>(i);
    svg.label({left - 8, y + high / 2 + 4}, std::to_string(line.rank), "small end");
    svg.box({left, y, length, high}, "soft");
    for (const TimelineEvent& e : line.events) {
      const double wide = x(e.end) - x(e.begin);
      if (e.kind == TimelineEvent::Kind::wait || wide < 0.05) continue;
      const bool moves = e.kind == TimelineEvent::Kind::exchange;
      const double gap = wide > 2 ? 0.5 : 0;
      const Box box =
          moves ? Box{x(e.begin), y + split + 1, wide - gap, high - split - 1} : Box{x(e.begin), y, wide - gap, split};
      svg.box(box, e.step < 0 ? "other" : weft::text(moves ? "t" : "s", e.step),
              weft::text("rank ", line.rank, ": ", e.name, e.step < 0 ? "" : weft::text(", step ", e.step), ", ",
                         time_text(e.end - e.begin)));
    }
  }
  const double bottom = from.y + 6 + lane * static_cast<double>(shown);
  const double step = round_step(end * 60 / length);
  for (double n = 0; n * step <= end * 1.0001; ++n) {
    const double t = n * step;
    svg.line({x(t), bottom - 1}, {x(t), bottom + 3});
    svg.label({x(t), bottom + 13}, time_text(t), n == 0 ? "small" : t > end * 0.95 ? "small end" : "small mid");
  }
  return bottom + 18 - from.y;
}

}  // namespace weft::draw
