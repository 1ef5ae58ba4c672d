// Errors that nobody can be told of.
#pragma once

#include <cuda_runtime_api.h>

namespace weft::cuda {

// As in destructors. One that lasts is met again by the next call; one that does not must not stay CUDA's last error,
// which the caller may ask for after a call of its own.
inline void clear_last_error(cudaError_t result) noexcept {
  if (result != cudaSuccess) cudaGetLastError();
}

}  // namespace weft::cuda
