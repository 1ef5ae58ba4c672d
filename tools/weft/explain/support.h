// weft explain --support: the capability table, and the kernels of this machine.
#pragma once

#include "flags/flags.h"

namespace weft::tool {

int explain_support(const Flags& flags);

}  // namespace weft::tool
