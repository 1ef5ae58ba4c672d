// Why GPU kernels refuse a request, decided from a GPU's properties: works without CUDA and without a GPU.
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

}  // namespace weft
