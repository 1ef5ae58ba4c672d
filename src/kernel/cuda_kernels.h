// The kernels for GPUs, and why they refuse a request. The reasons are decided from a GPU's properties: that works
// without CUDA and without a GPU.
#pragma once

#include <optional>
#include <string>

#include "weft/kernel.h"

namespace weft {

struct GpuProperties {
  std::string missing = {};  // why there is no GPU; empty: there is one
  int major = 0, minor = 0;  // compute capability
  Index shared_bytes = 0;    // of shared memory that a block may have
};

std::optional<std::string> portable_refusal(const GpuProperties& gpu, const KernelRequest& request);
std::optional<std::string> sm90_refusal(const GpuProperties& gpu, const KernelRequest& request);

namespace cuda {

GpuProperties gpu_properties(int device);

// Kernel cuda.portable: tensor cores through mma.sync, for every GPU since compute capability 8.0.
void portable_forward(const KernelForwardArgs& args);
void portable_backward(const KernelBackwardArgs& args);
void finish_partial(const FinishArgs& args);

// Kernel cuda.sm90: TMA and WGMMA, for Hopper.
namespace sm90 {
void forward(const KernelForwardArgs& args);
void backward(const KernelBackwardArgs& args);
bool takes_steps(const ForwardArgs& args);
bool takes_steps_backward(const BackwardArgs& args);
}  // namespace sm90

}  // namespace cuda
}  // namespace weft
