// One call of a kernel on a case, timed.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "calibrate/kernel_cases.h"
#include "weft/attention.h"
#include "weft/kernel.h"

namespace weft::tool {

bool on_gpu(const std::string& kernel);

// Random numbers in a GPU's memory, made once: the inputs of all calls are parts of them.
class Noise {
 public:
  Noise() = default;
  ~Noise();
  Noise(const Noise&) = delete;
  Noise& operator=(const Noise&) = delete;

  // `bytes` of them from a place of its own for each n from 0 to 3.
  void* at(const Place& place, DType dtype, Index bytes, Index n);

 private:
  DType dtype_ = DType::f32;
  Index bytes_ = 0;
  std::vector<void*> made_;  // the last one is the largest; calls hold parts of the others
};

// Tensors of a case where the kernel wants them.
class KernelCall {
 public:
  // The noise outlives the call.
  KernelCall(const KernelCase& c, DType dtype, Index dim, Pass pass, const std::string& kernel, Noise& noise);
  ~KernelCall();
  KernelCall(const KernelCall&) = delete;
  KernelCall& operator=(const KernelCall&) = delete;

  // Seconds of one call, from start to end; on the CPU, of this thread's own time: kernels are to use one thread.
  double seconds();
  // Of the GPU, by events around each of a few calls that are waited for: the median.
  double gpu_seconds();
  // The same on the CPU. On a GPU, calls one after another without a wait between them, after others that are not
  // timed: the host makes the next one's lists meanwhile, and the clock is the one that the GPU keeps up.
  double sustained_seconds();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace weft::tool
