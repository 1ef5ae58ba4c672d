// weft bench --schedule: schedules side by side on one problem, on ranks that are threads, over links of any speed.
#pragma once

#include "flags/flags.h"

namespace weft::tool {

int bench_schedules(const Flags& flags);

}  // namespace weft::tool
