// The current device of this thread, for as long as this lives.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/check.h"

namespace weft::cuda {

class OnDevice {
 public:
  explicit OnDevice(int device) {
    WEFT_CUDA(cudaGetDevice(&before_));
    if (device != before_) WEFT_CUDA(cudaSetDevice(device));
    changed_ = device != before_;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);  // nobody to tell
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace weft::cuda
