// Sets the current device of this thread, and restores it in the destructor.
#pragma once

#include <new>

#include <cuda_runtime_api.h>

#include "cuda/check.h"
#include "cuda/last_error.h"

namespace weft::cuda {

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    WEFT_CUDA(cudaGetDevice(&before_));
    if (device != before_) WEFT_CUDA(cudaSetDevice(device));
    changed_ = device != before_;
  }
  // For destructors: if the current device cannot be queried, it is taken to be the right one.
  DeviceGuard(int device, std::nothrow_t) noexcept : before_(device) {
    clear_last_error(cudaGetDevice(&before_));
    if (device == before_) return;
    clear_last_error(cudaSetDevice(device));
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) clear_last_error(cudaSetDevice(before_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace weft::cuda
