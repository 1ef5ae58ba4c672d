// What a kernel costs, from times of its calls.
#pragma once

#include <vector>

#include "calibrate/kernel_cases.h"
#include "weft/cost.h"

namespace weft::tool {

// The kernel's tiles; costs are not known yet.
KernelRate tiles_of(Pass pass, DType dtype, Index dim, bool gpu);
// Costs by least squares of relative errors, none below 0.
KernelRate fitted_rate(KernelRate tiles, const std::vector<KernelCase>& cases, const std::vector<double>& seconds);
double predicted_seconds(const KernelCase& c, const KernelRate& rate);

}  // namespace weft::tool
