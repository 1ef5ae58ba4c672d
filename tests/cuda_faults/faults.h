// Calls of CUDA that fail when they are told to: the linker puts wrappers (calls.inc) between Weft and CUDA.
#pragma once

#include <string>

#include <cuda_runtime_api.h>

namespace weft::faults {

// Call number n from now on fails, counted from 0 over all threads; `lasting`: and so do all after it, until disarm().
void arm(long n, bool lasting);
struct Failed {
  std::string call;   // empty: there was no such call
  bool told = false;  // somebody must say so
};
Failed disarm();

// What was taken and not given back, but for what Weft keeps for the next who asks (src/cuda/handle_pool.h).
struct Ledger {
  long memory = 0, pinned = 0, pools = 0, events = 0, streams = 0;
  friend bool operator==(const Ledger&, const Ledger&) = default;
};
Ledger ledger();
std::string words(const Ledger& ledger);

// Failures that somebody's next cudaGetLastError would tell of once more.
long left_behind();

// How often each call has failed so far, a line each, and those that never did.
std::string table();

}  // namespace weft::faults
