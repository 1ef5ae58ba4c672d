// weft explain --html, --svg: a panel for each layout and schedule that was asked for.
#pragma once

#include "flags/flags.h"

namespace weft::tool {

const std::vector<FlagSpec>& figure_flags();
bool asks_for_figure(const Flags& flags);
int explain_figure(const Flags& flags);
// Error if a flag is given that only --html and --svg take.
void refuse_figure_flags(const Flags& flags);

}  // namespace weft::tool
