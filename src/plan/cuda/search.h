// Which sequence contains a token: a warp searches for up to 32 tokens at once.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace weft {

// Offsets as 32-bit numbers. 64-bit ones that do not fit are invalid, and map to invalid values.
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

// The first step of a search reads offsets that do not depend on the value, so they can be loaded while the value is
// still being computed: lane l holds offsets[l·step], 32 of [0, n). The whole warp calls it.
__device__ inline int probe(const Offsets32& offsets, int low, int n) {
  const int lane = static_cast<int>(threadIdx.x % 32), step = (n + 31) / 32;
  return offsets[low + max(0, min(lane * step, n - 1))];
}

// For each lane the last i of [0, n) with offsets[i] <= value, which is the non-empty one of sequences that begin
// there; 0 if there is none. n is at least 1, offsets has n + 1 entries, and `first` is probe(offsets, 0, n). Values of
// lanes are close to each other and mostly in one sequence, so the warp searches for the least, in steps of 32 and then
// among 128 neighbours: two round trips to memory for 4,096 sequences, three for 100,000.
__device__ inline Found last_at_or_before(const Offsets32& offsets, int n, int first, int value) {
  constexpr unsigned kAll = ~0u;
  constexpr int kNeighbours = 128;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int least = __reduce_min_sync(kAll, value), greatest = __reduce_max_sync(kAll, value);
  int low = 0, size = n;  // the least value's answer lies in [low, low + size)
  while (size > kNeighbours) {
    const int at = low == 0 && size == n ? first : probe(offsets, low, size), step = (size + 31) / 32;
    const int skipped = max(0, __popc(__ballot_sync(kAll, lane * step < size && at <= least)) - 1) * step;
    low += skipped;
    size = min(step, size - skipped);
  }
  int at[kNeighbours / 32], before = 0;
#pragma unroll
  for (int j = 0; j < kNeighbours / 32; ++j)
    at[j] = offsets[low + min(32 * j + lane, size - 1)];  // one round trip for all
#pragma unroll
  for (int j = 0; j < kNeighbours / 32; ++j)
    before += __popc(__ballot_sync(kAll, 32 * j + lane < size && at[j] <= least));
  low += max(0, before - 1);
  const int own = offsets[min(low + lane, n)];  // lane j holds offsets[low + j]
  const Found found{low, __shfl_sync(kAll, own, 0), __shfl_sync(kAll, own, 1)};
  if (greatest < found.end || low == n - 1) return found;
  int count = 0;  // of the 31 entries after `low`, those that are not past the value
  for (int d = 16; d > 0; d /= 2) {
    const int other = __shfl_sync(kAll, own, count + d);
    if (low + count + d < n && other <= value) count += d;
  }
  const int begin = __shfl_sync(kAll, own, count), end = __shfl_sync(kAll, own, min(count + 1, 31));
  if (count < 31) return {low + count, begin, end};
  int i = low + count, stop = n;  // far from the least value: each lane searches alone
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
