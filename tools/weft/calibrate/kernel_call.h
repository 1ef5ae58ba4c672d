// One kernel call, timed on the CPU or on a GPU.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "calibrate/kernel_cases.h"
#include "weft/attention.h"
#include "weft/kernel.h"

namespace weft::tool {

bool on_gpu(const std::string& kernel);

// Random numbers in a GPU's memory, made once: all calls take their inputs from it.
class Noise {
 public:
  Noise() = default;
  ~Noise();
  Noise(const Noise&) = delete;
  Noise& operator=(const Noise&) = delete;

  // `bytes` random bytes of elements of `dtype`; another part of the memory for each n from 0 to 3.
  void* at(const Place& place, DType dtype, Index bytes, Index n);

 private:
  DType dtype_ = DType::f32;
  Index bytes_ = 0;
  std::vector<void*> buffers_;  // the last is the largest; earlier ones live on because calls point into them
};

struct CallOptions {
  std::string kernel;
  Pass pass = Pass::forward;
  DType dtype = DType::f32;
  Index dim = 128, dim_v = 128;
  bool v_is_k = false;  // V is the first columns of K
  double softcap = 0;
  Index keys_per_split = 0;  // as ForwardArgs::keys_per_split
  bool deterministic = false;
  bool graph = false;  // on a GPU: planned from cu_seqlens in device memory, the whole replayed as a CUDA graph
};

// The tensors of a case, where the kernel wants them.
class KernelCall {
 public:
  // The noise must outlive the call.
  KernelCall(const KernelCase& c, const CallOptions& options, Noise& noise);
  ~KernelCall();
  KernelCall(const KernelCall&) = delete;
  KernelCall& operator=(const KernelCall&) = delete;

  // Seconds of one call from start to end. On the CPU it is this thread's CPU time, so kernels must use one thread.
  double call();
  // The mean over a few such calls.
  double seconds();
  // Median over a few calls that are each waited for, by CUDA events around each.
  double gpu_seconds();
  // On a GPU: mean over calls in flight back to back, after a warm-up. The host prepares the next call meanwhile, and
  // the GPU runs at the clock it can sustain. On the CPU the same as seconds().
  double sustained_seconds();
  // Median wall time that a call takes its host thread while the GPU is busy.
  double host_seconds();

 private:
  struct Data;
  std::unique_ptr<Data> data_;
};

}  // namespace weft::tool
