// Which sequence holds a token: a warp looks for 32 tokens at once.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace weft {

// Offsets as 32-bit numbers. Wider ones that do not fit are wrong anyway; they stay wrong.
struct Offsets32 {
  const void* data;
  bool wide;

  __device__ int operator[](int i) const {
    if (!wide) return static_cast<const std::int32_t*>(data)[i];
    const long long v = static_cast<const long long*>(data)[i];
    return v > 0x7fffffff ? 0x7fffffff : v < 0 ? -1 : static_cast<int>(v);
  }
};

struct Found {
  int index, begin, end;  // offsets[index], offsets[index + 1]
};

// For each lane the last i of [0, n) with offsets[i] <= value: of sequences that begin there the one that is not empty.
// 0 if there is none. Lanes' values are often near each other: the warp narrows down on the least in steps of 32, then
// each lane looks among 32 offsets that all hold together. n is at least 1, and offsets has n + 1 entries.
__device__ inline Found last_at_or_before(const Offsets32& offsets, int n, int value) {
  constexpr unsigned kAll = ~0u;
  const int lane = static_cast<int>(threadIdx.x % 32);
  int low = 0, high = n;  // the least value's answer lies in [low, high)
  if (n > 16) {
    const int least = __reduce_min_sync(kAll, value);
    while (high - low > 16) {
      const int step = (high - low + 31) / 32, probe = low + lane * step;
      const unsigned before = __ballot_sync(kAll, probe < high && offsets[probe] <= least);
      const int steps = max(1, __popc(before)) - 1;
      low = min(low + steps * step, high - 1);
      high = min(high, low + step);
    }
  }
  const int own = offsets[min(low + lane, n)];  // lane j holds offsets[low + j]
  int count = 0;  // of the 31 after `low` that may be the answer and are not past the value
  for (int d = 16; d > 0; d /= 2) {
    const int other = __shfl_sync(kAll, own, count + d);
    if (low + count + d < n && other <= value) count += d;
  }
  const int begin = __shfl_sync(kAll, own, count), end = __shfl_sync(kAll, own, min(count + 1, 31));
  if (count < 31) return {low + count, begin, end};
  int i = low + count, stop = n;  // far from the least: alone from here
  while (stop - i > 1) {
    const int middle = i + (stop - i) / 2;
    if (offsets[middle] <= value)
      i = middle;
    else
      stop = middle;
  }
  return {i, offsets[i], offsets[i + 1]};
}

}  // namespace weft
