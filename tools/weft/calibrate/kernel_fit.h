// Fits the costs of a kernel (KernelRate) to measured times of its calls.
#pragma once

#include <vector>

#include "calibrate/kernel_cases.h"
#include "weft/cost.h"

namespace weft::tool {

// The kernel's tile sizes; its costs are still unknown.
KernelRate tiles_of(Pass pass, DType dtype, Index dim, bool gpu);
// Costs by least squares of relative errors, none below 0.
KernelRate fitted_rate(KernelRate tiles, const std::vector<KernelCase>& cases, const std::vector<double>& seconds);
double predicted_seconds(const KernelCase& c, const KernelRate& rate);

}  // namespace weft::tool
