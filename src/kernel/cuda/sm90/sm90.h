// Kernel cuda.sm90: TMA and WGMMA, for Hopper.
#pragma once

#include "weft/attention.h"

namespace weft::cuda::sm90 {

void forward(const ForwardArgs& args);
void backward(const BackwardArgs& args);
bool takes_steps(const ForwardArgs& args);
bool takes_steps_backward(const BackwardArgs& args);

}  // namespace weft::cuda::sm90
