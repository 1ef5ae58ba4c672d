// weft bench --schedule: compares schedules on one problem, with threads as ranks and links of any speed.
#pragma once

#include "flags/flags.h"

namespace weft::tool {

int bench_schedules(const Flags& flags);

}  // namespace weft::tool
