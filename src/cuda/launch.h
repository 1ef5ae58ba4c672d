// The launch wrapper: opts in to large shared memory, and checks the result.
#pragma once

#include <cstddef>

#include <cuda_runtime.h>

#include "cuda/runtime.h"

namespace weft::cuda {

struct Shape {
  dim3 blocks = {1, 1, 1};
  dim3 threads = {1, 1, 1};
  std::size_t shared_bytes = 0;
  // Programmatic dependent launch: blocks may start when those of the previous kernel have called
  // griddepcontrol.launch_dependents or exited; they must call griddepcontrol.wait before they read what that kernel
  // writes.
  bool programmatic = false;
};

// Opts in to more than 48 KiB of shared memory, once per kernel and device.
void allow_shared(const void* kernel, std::size_t bytes);

// An empty grid launches nothing.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const Shape& shape, cudaStream_t stream, Arguments&&... arguments) {
  if (shape.blocks.x == 0 || shape.blocks.y == 0 || shape.blocks.z == 0) return;
  constexpr std::size_t kWithoutAsking = 48 * 1024;
  if (shape.shared_bytes > kWithoutAsking) allow_shared(reinterpret_cast<const void*>(kernel), shape.shared_bytes);
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.blocks;
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = shape.programmatic ? 1 : 0;
  WEFT_CUDA(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

}  // namespace weft::cuda
