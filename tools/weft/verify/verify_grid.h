// weft verify --matrix and --set: whole grids of problems by all schedules.
#pragma once

#include "flags/flags.h"

namespace weft::tool {

int verify_matrix(const Flags& flags);
int verify_set(const Flags& flags);

}  // namespace weft::tool
