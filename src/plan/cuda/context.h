// What launches on one stream share: the state of scans, and the page for faults.
#pragma once

#include <memory>

#include <cuda_runtime.h>

#include "cuda/last_error.h"
#include "cuda/stream_array.h"
#include "plan/faults.h"
#include "weft/device_plan.h"

namespace weft {

// Sums over blocks within one launch. Words of `sums` carry the launch's number, so nothing has to be cleared before
// the next one; the rest is put back by the last block.
struct ScanState {
  static constexpr int kBlocks = 512, kSums = 3;

  unsigned ticket, done, launches, claimed;
  unsigned long long worst;  // ~(sequence, code, side) of the first faulty sequence; 0: none
  int longest[2];
  unsigned long long total[kSums];
  unsigned long long sums[kSums][kBlocks];  // launch << 32 | sum of a block
};

struct FaultPage {
  Fault fault;  // in host memory that the device can write; code last
};

// Where a kernel says what is wrong.
struct Reporter {
  ScanState* state;
  FaultPage* page;  // the device's address of it

  // The first one stays until the host has seen it.
  __device__ void report(const Fault& fault) const {
    if (atomicCAS(&state->claimed, 0u, 1u) != 0u) return;
    volatile Fault* to = &page->fault;
    to->keys = fault.keys;
    to->sequence = fault.sequence;
    to->a = fault.a;
    to->b = fault.b;
    __threadfence_system();
    to->code = fault.code;
    __threadfence_system();
  }
};

namespace detail {

struct FreePinned {
  void operator()(void* data) const {
    cuda::clear_last_error(cudaFreeHost(data));
  }  // waits for the work that may use it
};
template <class T>
using Pinned = std::unique_ptr<T, FreePinned>;

struct ContextData {
  Place place;
  cuda::StreamArray<ScanState> state;
  Pinned<FaultPage> page;            // the host's address
  FaultPage* device_page = nullptr;  // the device's
  bool has_copy_engine = false;      // bulk copies, in the GPU and in the code that was compiled for it

  explicit ContextData(const Place& where);
  ContextData(const ContextData&) = delete;

  cudaStream_t stream() const { return static_cast<cudaStream_t>(place.stream); }
  Reporter reporter() const { return {state.get(), device_page}; }
  // At the beginning of every call: the right GPU, and nothing reported.
  void enter();
};

}  // namespace detail
}  // namespace weft
