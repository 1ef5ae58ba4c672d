#include "cuda/runtime.h"

#include <map>
#include <mutex>
#include <utility>

#include "cuda/launch.h"
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

void allow_shared(const void* kernel, std::size_t bytes) {
  static std::mutex mutex;
  static auto& allowed = *new std::map<std::pair<const void*, int>, std::size_t>;
  int device = 0;
  WEFT_CUDA(cudaGetDevice(&device));
  const std::lock_guard lock(mutex);
  std::size_t& most = allowed[{kernel, device}];
  if (bytes <= most) return;
  WEFT_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  most = bytes;  // only after success
}

}  // namespace weft::cuda
