// weft explain --html, --svg: the problem drawn, one panel for each layout and schedule that was asked for.
#pragma once

#include "flags/flags.h"

namespace weft::tool {

const std::vector<FlagSpec>& drawn_flags();
bool asks_for_drawing(const Flags& flags);
int explain_drawn(const Flags& flags);
// Error if a flag is given that only drawings have.
void refuse_drawn_flags(const Flags& flags);

}  // namespace weft::tool
