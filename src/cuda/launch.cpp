#include "cuda/launch.h"

#include <map>
#include <mutex>
#include <utility>

namespace weft::cuda {

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
