// Fits the costs of a kernel (KernelRate) to measured times of its calls.
#pragma once

#include <vector>

#include "calibrate/kernel_cases.h"
#include "weft/cost.h"

namespace weft::tool {

// Tile sizes that the kernel may have; its costs are still unknown.
std::vector<KernelRate> tilings_of(Pass pass, DType dtype, Index dim, bool gpu);
// Costs by least squares of relative errors, none below 0, with the tile sizes that leave the least.
KernelRate fitted_rate(const std::vector<KernelRate>& tilings, const std::vector<KernelCase>& cases,
                       const std::vector<double>& seconds);
double predicted_seconds(const KernelCase& c, const KernelRate& rate);

}  // namespace weft::tool
