// The modes of weft bench that have files of their own.
#pragma once

#include "flags/flags.h"

namespace weft::tool {

int bench_gpu(const Flags& flags);        // --kernel cuda.*: problems that fill a GPU, whole and as one rank of several
int bench_schedules(const Flags& flags);  // --schedule: schedules on one problem, with threads as ranks
int bench_predict(const Flags& flags);  // --predict N: predictions against measurements, threads as ranks, slowed links

}  // namespace weft::tool
