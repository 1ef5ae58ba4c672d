// What the device reads of a call's work: slices, and which of them touch which tile. Plain arrays in device memory
// with their counts next to them, so that a list made on the device can be used without asking the host: grids are as
// large as the list can be, and blocks past the count return.
#pragma once

#include <vector_types.h>

#include "weft/slice.h"

namespace weft::cuda {

// A slice in 32 bits (kMaxTokens), trimmed to the rows that see a key and the keys that a row sees. An unlimited band
// saturates at +-(2^31 - 1), which no difference of rows exceeds.
struct alignas(16) WorkSlice {  // two loads of 16 bytes
  int q_begin, q_end;
  int k_begin, k_end;
  int k_first;  // the slice's own k_begin, from which key tiles of the forward are counted
  int lo, hi;
  int tile_shift =
      0;  // backward on sm90: added to query rows so that tiles of the document begin at multiples of the tile size
};

WEFT_HD constexpr int within_32_bits(Index x) {
  constexpr Index kFar = (Index{1} << 31) - 1;
  return static_cast<int>(max_of(-kFar, min_of(kFar, x)));
}
// Without query rows if nothing is visible.
WEFT_HD constexpr WorkSlice work_slice(const Slice& s) {
  const Slice t = trimmed(s, true);
  return {within_32_bits(t.q_begin), within_32_bits(t.q_end), within_32_bits(t.k_begin), within_32_bits(t.k_end),
          within_32_bits(s.k_begin), within_32_bits(t.lo),    within_32_bits(t.hi)};
}
// What is left of it in buffers of so many rows. A slice of a plan for other tensors is cut off before it is trimmed,
// so that every row and key of what is left sees or is seen, as kernels expect.
WEFT_HD constexpr WorkSlice work_slice_within(Slice s, Index q_rows, Index k_rows) {
  s.q_begin = max_of(s.q_begin, 0), s.q_end = min_of(s.q_end, q_rows);
  s.k_begin = max_of(s.k_begin, 0), s.k_end = min_of(s.k_end, k_rows);
  WorkSlice w = work_slice(s);
  if (w.k_begin >= w.k_end || w.q_begin >= w.q_end) w.q_end = w.q_begin;
  return w;
}

// Tiles of query or key rows, of a fixed size from row 0 on or as the list's maker defines them, and the slices that
// touch each. A slice is stored once per tile, because threads read it often and one load is better than two dependent
// ones.
struct WorkList {
  const WorkSlice* slices;  // of each tile in the order they were given
  const int2* ranges;       // [tiles] begin and end of a tile's slices, in no order between tiles
  const int* order;         // [tiles] order of work: expensive tiles first, and tiles that read the same data together
  const int* tiles;         // the number of tiles, including those without slices
};

// Query heads of each K/V head.
struct WorkHeads {
  const int* kv_head;  // [hq]
  const int* begin;    // [hk + 1]
  const int* heads;    // [hq], grouped by K/V head
};

}  // namespace weft::cuda
