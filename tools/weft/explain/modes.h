// The modes of weft explain that have files of their own.
#pragma once

#include "flags/flags.h"

namespace weft::tool {

int explain_micro(const Flags& flags);    // --micro: the windows of micro-sequences
int explain_support(const Flags& flags);  // --support: the capability table, and the kernels of this machine
int explain_flight(const Flags& flags);   // --flight: the last calls of ranks that hung or failed

// --html, --svg: a panel for each layout and schedule that was asked for.
std::vector<FlagSpec> with_figure_flags(std::vector<FlagSpec> flags);
bool asks_for_figure(const Flags& flags);
int explain_figure(const Flags& flags);
void refuse_figure_flags(const Flags& flags);  // Error if a flag is given that only figures take

}  // namespace weft::tool
