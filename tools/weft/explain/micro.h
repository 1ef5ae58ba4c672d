// weft explain --micro: the windows of micro-sequences, drawn and listed.
#pragma once

#include "flags/flags.h"

namespace weft::tool {

int explain_micro(const Flags& flags);

}  // namespace weft::tool
