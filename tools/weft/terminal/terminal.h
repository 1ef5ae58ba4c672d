// What the terminal can show: letters for ranks, colours where they are wanted, bars.
#pragma once

#include <string>

#include "weft/config.h"

namespace weft::tool {

inline constexpr Index kLetters = 26;

// 'A' for rank 0; lower case on request.
char letter(Index rank, bool upper = true);

// The text in the rank's colour: on a coloured ground if `solid`, else coloured letters. Colours only on a terminal,
// and not if NO_COLOR is set (no-color.org). Everything is readable without them.
std::string coloured(const std::string& text, Index rank, bool solid);

// A bar of `fraction` of `width` columns, in eighths of a column, padded with spaces.
std::string bar(double fraction, int width);

}  // namespace weft::tool
