// What GPU kernels cannot do, told from what is known of a GPU: needs neither CUDA nor a GPU.
#pragma once

#include <optional>
#include <string>

#include "weft/kernel.h"

namespace weft {

struct GpuProperties {
  std::string missing = {};  // why there is none; empty: there is one
  int major = 0, minor = 0;  // compute capability
  Index shared_bytes = 0;    // that a block may ask for
};

std::optional<std::string> portable_refusal(const GpuProperties& gpu, const KernelRequest& request);
std::optional<std::string> sm90_refusal(const GpuProperties& gpu, const KernelRequest& request);

}  // namespace weft
