// Errors that cannot be reported.
#pragma once

#include <cuda_runtime_api.h>

namespace weft::cuda {

// For destructors and queries: a sticky error shows up in the next call; any other must not stay CUDA's last error,
// which the caller may query after a call of its own.
inline void clear_last_error(cudaError_t result) noexcept {
  if (result != cudaSuccess) cudaGetLastError();
}

}  // namespace weft::cuda
