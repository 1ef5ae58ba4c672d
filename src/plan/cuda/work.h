// Which slices each tile of rows has, and in which order tiles are best begun: from slices in device memory, there.
//
// A kernel that gives a tile to a block:
//   const int tile = work.order[i];                      // i = blockIdx.x, or a ticket
//   const TileRange range = work.ranges[tile];
//   for (int e = range.begin; e < range.end; ++e) attend(tile, slices[work.slices[e]]);
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/memory.h"
#include "plan/cuda/context.h"
#include "weft/device_plan.h"

namespace weft {

struct TileRange {
  std::int32_t begin, end;
};

// Tile t is rows [t·tile_rows, (t+1)·tile_rows) of the query buffer, or of the key buffer. All pointers are the
// device's.
struct DeviceWork {
  int tile_rows, tiles;
  const std::int32_t*
      order;  // [tiles] tiles with slices first, the dearest first within about a quarter; then the rest
  const std::int32_t* count;   // [1] tiles that have slices
  const TileRange* ranges;     // [tiles] where in `slices` a tile's begin and end, in no order between tiles
  const std::int32_t* slices;  // numbers of slices, rising within a tile: sums run in the same order every time
};

enum class WorkSide { queries, keys };

// Entries that no plan of so many slices can exceed, if no row lies in more than `per_row` of them.
inline Index work_capacity(Index slices, Index tiles, Index per_row) {
  return slices == 0 ? 0 : slices + max_of(0, tiles - 1) * per_row;
}

// Filled again and again at the same addresses; may be captured. Make it outside of a capture.
class WorkList {
 public:
  // `capacity`: see work_capacity; `rows`: of the side's buffer.
  WorkList(detail::ContextParts& context, WorkSide side, Index rows, int tile_rows, Index capacity);

  void build(const DeviceSlices& slices);  // two small launches; a fault if entries do not fit: no tile has slices then
  DeviceWork view() const;

 private:
  struct State {
    int entries, done;
  };

  detail::ContextParts* context_;
  WorkSide side_;
  int tile_rows_, tiles_;
  Index capacity_;
  cuda::StreamArray<State> state_;
  cuda::StreamArray<int2> touched_;  // [tiles]
  cuda::StreamArray<std::int32_t> order_, count_, slices_;
  cuda::StreamArray<TileRange> ranges_;
  cuda::StreamArray<std::uint8_t> cost_;  // [tiles] by powers of two and quarters of them

  friend struct WorkArrays;
};

}  // namespace weft
