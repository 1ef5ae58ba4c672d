// Kernel cuda.portable: tensor cores through mma.sync, for every GPU since compute capability 8.0.
#pragma once

#include "kernel/cuda_refusal.h"
#include "weft/attention.h"

namespace weft::cuda {

GpuProperties gpu_properties(int device);
void portable_forward(const ForwardArgs& args);
void portable_backward(const BackwardArgs& args);
void finish_partial(const ForwardArgs& args);

}  // namespace weft::cuda
