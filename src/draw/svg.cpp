// The SVG picture: a panel for each layout and schedule, with its matrix, bars and timeline.
#include <algorithm>

#include "draw/formatting.h"
#include "draw/palette.h"
#include "draw/svg_panel.h"
#include "text.h"

namespace weft::draw {
namespace {

constexpr double kMargin = 16, kPanel = 440, kBetween = 30, kSide = 82, kTop = 62, kMatrix = kPanel - kSide;
constexpr Index kColumns = 3;

std::string colours(const Figure& figure, bool dark, Index ranks, Index steps) {
  const Palette& p = palette(dark);
  std::string out = weft::text("svg{fill:", hex(p.ink), "}.quiet{fill:", hex(p.quiet), "}.empty{fill:", hex(p.empty),
                               "}.soft{fill:", hex(p.soft), "}.wait,.padding{fill:", hex(p.wait),
                               "}.frame,.edge{stroke:", hex(p.edge), "}.mixed,.other{fill:", hex(p.quiet),
                               "}.cell{stroke:", hex(p.paper), "}");
  const std::vector<Colour> by_rank = rank_colours(p, ranks), by_step = step_colours(p, steps);
  for (std::size_t r = 0; r < by_rank.size(); ++r)
    out += weft::text(".r", r, "{fill:", hex(by_rank[r]), "}.p", r, "{fill:", hex(pale(p, by_rank[r])), "}");
  for (std::size_t s = 0; s < by_step.size(); ++s)
    out +=
        weft::text(".s", s, "{fill:", hex(by_step[s]), "}.t", s, "{fill:", hex(mixed(by_step[s], p.soft, 0.35)), "}");
  // A thin stroke in their own colour keeps very small shapes visible.
  for (std::size_t r = 0; r < by_rank.size(); ++r)
    out +=
        weft::text(".r", r, ".area{stroke:", hex(by_rank[r]), "}.p", r, ".area{stroke:", hex(pale(p, by_rank[r])), "}");
  if (figure.subject.by_step)
    for (std::size_t s = 0; s < by_step.size(); ++s) out += weft::text(".s", s, ".area{stroke:", hex(by_step[s]), "}");
  return out;
}

std::string style(const Figure& figure, Index ranks, Index steps) {
  return weft::text(
      "<style>svg{font:13px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}"
      ".title{font-size:16px;font-weight:600}.name{font-weight:600}.small{font-size:10.5px}.mid{text-anchor:middle}"
      ".end{text-anchor:end}.frame{fill:none}.area{stroke-width:.3}.cell{stroke-width:.7}.edge{stroke-width:.7}",
      colours(figure, false, ranks, steps), "@media(prefers-color-scheme:dark){", colours(figure, true, ranks, steps),
      "}</style>\n");
}

// A legend in one line: every colour, or a ramp with its two ends where there are many. Returns its right end.
double draw_legend(std::string_view word, char letter, Index count, Point from, SvgWriter& svg) {
  svg.label({from.x, from.y + 9}, word, "small quiet");
  double x = from.x + text_width(word) + 8;
  if (count <= 16) {
    for (Index i = 0; i < count; ++i) {
      svg.box({x, from.y, 10, 10}, weft::text(letter, i));
      svg.label({x + 13, from.y + 9}, std::to_string(i), "small");
      x += 20 + text_width(std::to_string(i));
    }
    return x;
  }
  svg.label({x, from.y + 9}, "0", "small");
  x += 12;
  for (Index i = 0; i < 32; ++i)
    svg.box({x + 4 * static_cast<double>(i), from.y, 4.2, 10}, weft::text(letter, i * (count - 1) / 31));
  svg.label({x + 134, from.y + 9}, std::to_string(count - 1), "small");
  return x + 144 + text_width(std::to_string(count - 1));
}

std::string shortened(const std::string& text, std::size_t letters) {
  std::size_t seen = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool begins = (text[i] & 0xC0) != 0x80;  // a character of UTF-8
    if (begins && ++seen > letters) return text.substr(0, i) + "…";
  }
  return text;
}

}  // namespace

std::string svg(const Figure& figure) {
  Index ranks = 1, steps = 1;
  for (const Panel& p : figure.panels) {
    ranks = max_of(ranks, p.layouts.q.ranks());
    steps = max_of(steps, p.steps);
  }
  const Scales scales = scales_of(figure);
  const Index columns = min_of(static_cast<Index>(figure.panels.size()), kColumns);
  const std::string said = words(figure.subject), title = figure.subject.title.empty() ? said : figure.subject.title;
  SvgWriter svg;
  constexpr double kTitleLetter = 9.8, kLetter = 7.8;  // at their sizes, about
  constexpr std::size_t kLongest = 90;
  const std::string heading = shortened(title, kLongest);
  svg.label({kMargin, kMargin + 14}, heading, "title");
  double top = kMargin + 30;
  if (!figure.subject.title.empty()) {
    svg.label({kMargin, top + 4}, said, "quiet");
    top += 20;
  }
  const double after = draw_legend("rank", 'r', ranks, {kMargin, top}, svg) + 10;
  if (!figure.subject.by_step) svg.label({after, top + 9}, "pale: the key is on another rank", "small quiet");
  if (steps > 1 || figure.subject.by_step) {
    top += 17;
    const double end = draw_legend("step", 's', steps, {kMargin, top}, svg) + 10;
    svg.label({end, top + 9}, "grey: passes over rows, swaps of heads", "small quiet");
  }
  top += 34;
  double row_bottom = top;
  for (std::size_t i = 0; i < figure.panels.size(); ++i) {
    const Panel& panel = figure.panels[i];
    const Index column = static_cast<Index>(i) % columns;
    if (column == 0 && i > 0) top = row_bottom + 34;
    const double x = kMargin + (kPanel + kBetween) * static_cast<double>(column);
    svg.label({x, top}, words(panel), "name");
    const Box matrix{x + kSide, top + kTop - 4, kMatrix, kMatrix};
    draw_matrix(figure, panel, matrix, svg);
    double y = matrix.y + matrix.height + 24;
    y += draw_bars(figure, panel, scales, {x, y}, kPanel, svg) + 14;
    y += draw_timeline(panel, scales, {x, y}, kPanel, svg);
    row_bottom = std::max(row_bottom, y);
  }
  const double panels =
      2 * kMargin + kPanel * static_cast<double>(columns) + kBetween * static_cast<double>(columns - 1);
  const double words_width =
      2 * kMargin + std::max(kTitleLetter * text_width(heading), kLetter * text_width(said)) / text_width("m");
  const double width = std::max(panels, words_width), height = row_bottom + kMargin;
  return weft::text("<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" viewBox=\"0 0 ", decimal(width), " ",
                    decimal(height), "\" width=\"", decimal(width), "\" height=\"", decimal(height), "\">\n<title>",
                    escaped(title), "</title>\n<desc>", escaped(said), ". Made by weft explain.</desc>\n",
                    style(figure, ranks, steps), svg.text(), "</svg>\n");
}

}  // namespace weft::draw
