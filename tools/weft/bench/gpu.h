// weft bench --kernel cuda.*: packed documents of the size of a GPU's work, whole and as one rank of eight sees them.
#pragma once

#include "flags/flags.h"

namespace weft::tool {

int bench_gpu(const Flags& flags);

}  // namespace weft::tool
