// weft bench --kernel cuda.*: problems that fill a GPU, whole and as one rank of several sees them.
#pragma once

#include "flags/flags.h"

namespace weft::tool {

int bench_gpu(const Flags& flags);

}  // namespace weft::tool
