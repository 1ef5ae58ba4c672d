// The modes of weft verify that have files of their own.
#pragma once

#include "flags/flags.h"

namespace weft::tool {

inline constexpr int kFailed = 1, kNothingRan = 2;  // exit codes of weft verify

int verify_accuracy(
    const Flags& flags);  // --accuracy: kernels on inputs that are hard on arithmetic, against their bounds
int verify_matrix(const Flags& flags);  // --matrix: the support matrix by all schedules
int verify_set(const Flags& flags);     // --set: a grid of another framework by all schedules

}  // namespace weft::tool
