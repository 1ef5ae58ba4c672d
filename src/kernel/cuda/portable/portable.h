// Kernel cuda.portable: tensor cores through mma.sync, for every GPU since compute capability 8.0.
#pragma once

#include "kernel/cuda_refusal.h"
#include "weft/kernel.h"

namespace weft::cuda {

GpuProperties gpu_properties(int device);
void portable_forward(const KernelForwardArgs& args);
void portable_backward(const KernelBackwardArgs& args);
void finish_partial(const FinishArgs& args);

}  // namespace weft::cuda
