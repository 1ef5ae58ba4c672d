// The current device of this thread, for as long as this lives.
#pragma once

#include <new>

#include <cuda_runtime_api.h>

#include "cuda/check.h"
#include "cuda/forget.h"

namespace weft::cuda {

class OnDevice {
 public:
  explicit OnDevice(int device) {
    WEFT_CUDA(cudaGetDevice(&before_));
    if (device != before_) WEFT_CUDA(cudaSetDevice(device));
    changed_ = device != before_;
  }
  // For destructors: if the device cannot be asked for, it is taken to be the right one.
  OnDevice(int device, std::nothrow_t) noexcept : before_(device) {
    forget(cudaGetDevice(&before_));
    if (device == before_) return;
    forget(cudaSetDevice(device));
    changed_ = true;
  }
  ~OnDevice() {
    if (changed_) forget(cudaSetDevice(before_));
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace weft::cuda
