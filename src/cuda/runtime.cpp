#include "cuda/runtime.h"

#include "text.h"

namespace weft::cuda {

void check(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  clear_last_error(result);  // reported here, so the caller's next cudaGetLastError is about its own calls
  const bool memory = result == cudaErrorMemoryAllocation;
  throw Error(text("CUDA: ", call, ": ", cudaGetErrorName(result), ": ", cudaGetErrorString(result)),
              memory ? "give the GPU less to hold: fewer tokens, more ranks, or a smaller workspace"
                     : "run under compute-sanitizer, which names the launch that failed first");
}

}  // namespace weft::cuda
