// What the device reads of a call's work: slices, and which of them touch which tile. Plain arrays in device memory
// with their counts beside them, so that a list made on the device can be passed without asking the host: grids are
// then as large as the list can be, and blocks past the count do nothing.
#pragma once

#include <vector_types.h>

#include "weft/slice.h"

namespace weft::cuda {

// Rows fit 32 bits (weft::kMaxTokens). Cut to the rows that see a key and to the keys that a row sees; a band without
// limit saturates at +-(2^31 - 1), which no difference of rows passes.
struct alignas(16) WorkSlice {  // two loads of 16 bytes
  int q_begin, q_end;
  int k_begin, k_end;
  int k_first;  // key tiles of the forward count from here: the slice's own k_begin, whoever computes
  int lo, hi;
  int tile_shift = 0;
};

WEFT_HD constexpr int within_32_bits(Index x) {
  constexpr Index kFar = (Index{1} << 31) - 1;
  return static_cast<int>(max_of(-kFar, min_of(kFar, x)));
}
// Nothing visible: no query rows.
WEFT_HD constexpr WorkSlice work_slice(const Slice& s) {
  const Slice t = trimmed(s, true);
  return {within_32_bits(t.q_begin), within_32_bits(t.q_end), within_32_bits(t.k_begin), within_32_bits(t.k_end),
          within_32_bits(s.k_begin), within_32_bits(t.lo),    within_32_bits(t.hi)};
}

// Tiles of rows (of Q or of K), of a fixed number from row 0 on or as the list's maker says, and the slices that touch
// each. A slice stands once for every tile: threads read it often, and one load is better than two that wait for each
// other.
struct WorkList {
  const WorkSlice* slices;  // of each tile in the order they were given
  const int2* ranges;       // [tiles] where a tile's slices begin and end, in no order between tiles
  const int* order;         // [tiles] in which they are worked on: the expensive first, what reads the same together
  const int* tiles;         // how many there are, those without slices too
};

// Query heads of each K/V head.
struct WorkHeads {
  const int* kv_head;  // [hq]
  const int* begin;    // [hk + 1]
  const int* heads;    // [hq], grouped by K/V head
};

}  // namespace weft::cuda
