// The parts of a panel in an SVG picture. CSS classes: r0, r1, .. are the colours of ranks and p0, p1, .. their pale
// forms; s0, s1, .. and t0, t1, .. those of steps.
#pragma once

#include "draw/figure.h"
#include "draw/svg_writer.h"

namespace weft::draw {

// The mask: queries from top to bottom, keys from left to right, and along both sides the rank of each token.
void draw_matrix(const Figure& figure, const Panel& panel, const Box& box, SvgWriter& svg);

// The largest values over all panels, so that their charts have one scale.
struct Scales {
  double work = 0, bytes = 0, time = 0;
};
Scales scales_of(const Figure& figure);

// Each draws downwards from `from`, as wide as given, and returns its height.
double draw_bars(const Figure& figure, const Panel& panel, const Scales& scales, Point from, double width,
                 SvgWriter& svg);
double draw_timeline(const Panel& panel, const Scales& scales, Point from, double width, SvgWriter& svg);

double text_width(std::string_view text);  // estimate, at the font size of labels
double round_step(double least);           // 1, 2 or 5 times a power of ten, at least this

}  // namespace weft::draw
