// What launches on one stream share: scan state, and the page where the device reports faults.
#pragma once

#include <memory>

#include <cuda_runtime.h>

#include "cuda/handle_pool.h"
#include "cuda/runtime.h"
#include "plan/offset_faults.h"
#include "weft/device_plan.h"

namespace weft {

// Sums over blocks within one launch. Words of `sums` carry the launch's number, so nothing has to be cleared before
// the next one; the last block resets the rest.
struct ScanState {
  static constexpr int kBlocks = 512, kSums = 3;

  unsigned ticket, done, launches, claimed;
  unsigned long long worst;  // ~(sequence, code, side) of the first faulty sequence; 0: none
  int longest[2];
  unsigned long long total[kSums];
  unsigned long long sums[kSums][kBlocks];  // launch << 32 | sum of a block
};

struct FaultPage {
  OffsetFault fault;  // in mapped host memory; the device writes `code` last
};

// Lets a kernel report a fault.
struct Reporter {
  ScanState* state;
  FaultPage* page;  // device address

  // The first fault stays until the host has seen it.
  __device__ void report(const OffsetFault& fault) const {
    if (atomicCAS(&state->claimed, 0u, 1u) != 0u) return;
    volatile OffsetFault* to = &page->fault;
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
  Pinned<FaultPage> page;            // host address
  FaultPage* device_page = nullptr;  // device address
  bool has_bulk_copy = false;        // cp.async.bulk is available, in the GPU and in the compiled code
  bool faults_wait = false;          // a reported fault is thrown by check() alone, not by the next call

  explicit ContextData(const Place& where);
  ContextData(const ContextData&) = delete;

  cudaStream_t stream() const { return static_cast<cudaStream_t>(place.stream); }
  Reporter reporter() const { return {state.get(), device_page}; }
  // At the start of every call: selects the GPU, and throws a reported fault unless faults_wait.
  void enter();
  void check();  // selects the GPU, and throws a reported fault
};

}  // namespace detail
}  // namespace weft
