// Work that goes into a stream by several calls, any of which may fail.
#pragma once

#include <utility>

#include "cuda/last_error.h"

namespace weft::cuda {

// If `work` throws, what it has begun is waited for first: nothing is under way that would touch memory which is given
// back on the way out.
template <class Work>
void synchronize_on_failure(cudaStream_t stream, Work&& work) {
  try {
    std::forward<Work>(work)();
  } catch (...) {
    clear_last_error(cudaStreamSynchronize(stream));
    throw;
  }
}

}  // namespace weft::cuda
