// Several calls that put work into a stream, any of which may fail.
#pragma once

#include <utility>

#include "cuda/last_error.h"

namespace weft::cuda {

// If `work` throws, synchronizes the stream first, so that nothing in flight touches memory that is freed on the way
// out.
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
