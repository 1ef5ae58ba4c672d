// The colours of pages and pictures. They can be told apart without telling red from green: eight chosen by hand, more
// along ramps of monotonic lightness.
#pragma once

#include <string>
#include <vector>

#include "weft/config.h"

namespace weft::draw {

struct Colour {
  double red = 0, green = 0, blue = 0;  // 0 to 255
};
std::string hex(const Colour& colour);
Colour mixed(const Colour& a, const Colour& b, double weight_of_b);

struct Palette {
  // Backgrounds, text, lines; wait: padding and idle time; accent: focus, and what a page points out.
  Colour paper, empty, ink, quiet, line, edge, soft, wait, accent;
  std::vector<Colour> ranks;                 // used if there are no more ranks than these
  std::vector<Colour> rank_ramp, step_ramp;  // stops of a ramp
};
const Palette& palette(bool dark);

std::vector<Colour> rank_colours(const Palette& palette, Index ranks);
std::vector<Colour> step_colours(const Palette& palette, Index steps);
// The colour of pairs whose key is on another rank.
Colour pale(const Palette& palette, const Colour& colour);

// {"light": {"plain": {"paper": .., ..}, "ranks": [..], "rankRamp": [..], "stepRamp": [..]}, "dark": ..}
std::string palettes_json();

}  // namespace weft::draw
