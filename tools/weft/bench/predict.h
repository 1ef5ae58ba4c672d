// weft bench --predict N: predictions beside measurements, on ranks that are threads and links that are slowed.
#pragma once

#include "flags/flags.h"

namespace weft::tool {

int bench_predict(const Flags& flags);

}  // namespace weft::tool
