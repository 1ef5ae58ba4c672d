// The picture: panels side by side, each with its matrix, bars and timeline.
#include <algorithm>

#include "draw/palette.h"
#include "draw/svg_parts.h"
#include "draw/written.h"
#include "text.h"

namespace weft::draw {
namespace {

constexpr double kMargin = 16, kPanel = 440, kBetween = 30, kSide = 82, kTop = 62, kMatrix = kPanel - kSide;
constexpr Index kColumns = 3;

std::string colours(const Scene& scene, bool dark, Index ranks, Index steps) {
  const Palette& p = palette(dark);
  std::string out = weft::text("text{fill:", hex(p.ink), "}.quiet{fill:", hex(p.quiet), "}.empty{fill:", hex(p.empty),
                               "}.soft{fill:", hex(p.soft), "}.wait{fill:", hex(p.wait), "}.frame{stroke:", hex(p.edge),
                               "}.edge{stroke:", hex(p.edge), "}.mixed{fill:", hex(p.quiet),
                               "}.other{fill:", hex(p.quiet), "}.cell{stroke:", hex(p.paper), "}");
  const std::vector<Colour> by_rank = rank_colours(p, ranks), by_step = step_colours(p, steps);
  for (std::size_t r = 0; r < by_rank.size(); ++r)
    out += weft::text(".r", r, "{fill:", hex(by_rank[r]), "}.p", r, "{fill:", hex(pale(p, by_rank[r])), "}");
  for (std::size_t s = 0; s < by_step.size(); ++s)
    out +=
        weft::text(".s", s, "{fill:", hex(by_step[s]), "}.t", s, "{fill:", hex(mixed(by_step[s], p.soft, 0.35)), "}");
  // Small shapes keep a hair's width of their own colour.
  for (std::size_t r = 0; r < by_rank.size(); ++r)
    out +=
        weft::text(".r", r, ".area{stroke:", hex(by_rank[r]), "}.p", r, ".area{stroke:", hex(pale(p, by_rank[r])), "}");
  if (scene.subject.by_step)
    for (std::size_t s = 0; s < by_step.size(); ++s) out += weft::text(".s", s, ".area{stroke:", hex(by_step[s]), "}");
  return out;
}

std::string style(const Scene& scene, Index ranks, Index steps) {
  return weft::text(
      "<style>text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;font-size:13px}"
      ".title{font-size:16px;font-weight:600}.name{font-weight:600}.small{font-size:10.5px}.mid{text-anchor:middle}"
      ".end{text-anchor:end}.frame{fill:none}.area{stroke-width:.3}.cell{stroke-width:.7}.edge{stroke-width:.7}",
      colours(scene, false, ranks, steps), "@media(prefers-color-scheme:dark){", colours(scene, true, ranks, steps),
      "}</style>\n");
}

// Which colour is which, in one line; a ramp's ends where there are many. Returns where it ends.
double draw_key(std::string_view word, char letter, Index count, Point at, Ink& ink) {
  ink.label({at.x, at.y + 9}, word, "small quiet");
  double x = at.x + text_width(word) + 8;
  if (count <= 16) {
    for (Index i = 0; i < count; ++i) {
      ink.box({x, at.y, 10, 10}, weft::text(letter, i));
      ink.label({x + 13, at.y + 9}, std::to_string(i), "small");
      x += 20 + text_width(std::to_string(i));
    }
    return x;
  }
  ink.label({x, at.y + 9}, "0", "small");
  x += 12;
  for (Index i = 0; i < 32; ++i)
    ink.box({x + 4 * static_cast<double>(i), at.y, 4.2, 10}, weft::text(letter, i * (count - 1) / 31));
  ink.label({x + 134, at.y + 9}, std::to_string(count - 1), "small");
  return x + 144 + text_width(std::to_string(count - 1));
}

// At most so many letters.
std::string shortened(const std::string& text, std::size_t letters) {
  std::size_t seen = 0;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const bool begins = (text[at] & 0xC0) != 0x80;
    if (begins && ++seen > letters) return text.substr(0, at) + "…";
  }
  return text;
}

}  // namespace

std::string svg(const Scene& scene) {
  Index ranks = 1, steps = 1;
  for (const Panel& p : scene.panels) {
    ranks = max_of(ranks, p.layouts.q.ranks());
    steps = max_of(steps, p.steps);
  }
  const Scales scales = scales_of(scene);
  const Index columns = min_of(static_cast<Index>(scene.panels.size()), kColumns);
  const std::string said = words(scene.subject), title = scene.subject.title.empty() ? said : scene.subject.title;
  Ink ink;
  constexpr double kTitleLetter = 9.8, kLetter = 7.8;  // at their sizes, about
  constexpr std::size_t kLongest = 90;
  const std::string heading = shortened(title, kLongest);
  ink.label({kMargin, kMargin + 14}, heading, "title");
  double top = kMargin + 30;
  if (!scene.subject.title.empty()) {
    ink.label({kMargin, top + 4}, said, "quiet");
    top += 20;
  }
  const double after = draw_key("rank", 'r', ranks, {kMargin, top}, ink) + 10;
  if (!scene.subject.by_step) ink.label({after, top + 9}, "pale: the key is on another rank", "small quiet");
  if (steps > 1 || scene.subject.by_step) {
    top += 17;
    const double end = draw_key("step", 's', steps, {kMargin, top}, ink) + 10;
    ink.label({end, top + 9}, "grey: passes over rows, swaps of heads", "small quiet");
  }
  top += 34;
  double row_bottom = top;
  for (std::size_t i = 0; i < scene.panels.size(); ++i) {
    const Panel& panel = scene.panels[i];
    const Index column = static_cast<Index>(i) % columns;
    if (column == 0 && i > 0) top = row_bottom + 34;
    const double x = kMargin + (kPanel + kBetween) * static_cast<double>(column);
    ink.label({x, top}, words(panel), "name");
    const Box matrix{x + kSide, top + kTop - 4, kMatrix, kMatrix};
    draw_matrix(scene, panel, matrix, ink);
    double y = matrix.y + matrix.height + 24;
    y += draw_bars(scene, panel, scales, {x, y}, kPanel, ink) + 14;
    y += draw_times(panel, scales, {x, y}, kPanel, ink);
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
                    style(scene, ranks, steps), ink.text(), "</svg>\n");
}

}  // namespace weft::draw
