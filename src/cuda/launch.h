// The one launch wrapper: shape, stream, arguments; large shared memory is asked for, and the result is checked.
#pragma once

#include <cstddef>

#include <cuda_runtime.h>

#include "cuda/check.h"

namespace weft::cuda {

struct Shape {
  dim3 blocks = {1, 1, 1};
  dim3 threads = {1, 1, 1};
  std::size_t shared_bytes = 0;
};

// Nothing is launched for an empty grid.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const Shape& shape, cudaStream_t stream, Arguments&&... arguments) {
  if (shape.blocks.x == 0 || shape.blocks.y == 0 || shape.blocks.z == 0) return;
  constexpr std::size_t kWithoutAsking = 48 * 1024;
  if (shape.shared_bytes > kWithoutAsking)
    WEFT_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(shape.shared_bytes)));
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.blocks;
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  WEFT_CUDA(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

}  // namespace weft::cuda
