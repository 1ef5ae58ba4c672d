// Colours, said once for pages and pictures. People who see red and green as one can tell them apart: eight by hand,
// more along ramps whose lightness never turns back.
#pragma once

#include <string>
#include <vector>

#include "weft/config.h"

namespace weft::draw {

struct Colour {
  double red = 0, green = 0, blue = 0;  // 0 to 255
};
std::string hex(const Colour& colour);
Colour mixed(const Colour& a, const Colour& b, double share_of_b);

struct Palette {
  Colour paper, empty, ink, quiet, line, edge, soft, wait;
  std::vector<Colour> ranks;                 // if these are enough
  std::vector<Colour> rank_ramp, step_ramp;  // stops
};
const Palette& palette(bool dark);

std::vector<Colour> rank_colours(const Palette& palette, Index ranks);
std::vector<Colour> step_colours(const Palette& palette, Index steps);
// What is seen of a rank's pairs whose keys come from another rank.
Colour pale(const Palette& palette, const Colour& colour);

// {"light": {"ranks": [..], "rankRamp": [..], "stepRamp": [..]}, "dark": ..}
std::string palettes_json();

}  // namespace weft::draw
