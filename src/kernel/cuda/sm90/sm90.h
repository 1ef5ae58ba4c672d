// Kernel cuda.sm90: TMA and WGMMA, for Hopper.
#pragma once

#include "weft/kernel.h"

namespace weft::cuda::sm90 {

void forward(const KernelForwardArgs& args);
void backward(const KernelBackwardArgs& args);
bool takes_steps(const ForwardArgs& args);
bool takes_steps_backward(const BackwardArgs& args);

}  // namespace weft::cuda::sm90
