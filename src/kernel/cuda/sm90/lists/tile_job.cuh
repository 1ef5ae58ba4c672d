// What the launches that make device lists share.
#pragma once

#include "kernel/cuda/sm90/lists/device_tiles.h"
#include "kernel/cuda/work/cut.h"
#include "kernel/cuda/work/device_list.cuh"

namespace weft::cuda::sm90 {

// Marks of one side's rows, in words of 64 rows. All start as zeros.
struct SideMarks {
  int rows, words;
  RowBits* begins;  // rows where a slice begins
  RowBits* joins;   // rows that a slice connects with the row before, except in words that it covers
  int* covers;      // slices that cover a word from its first row, which joins the row before, to its last: +1 at the
                    // first such word of a slice, -1 after the last
  int2* touched;    // kTop - first slice, last slice + 1; zeros: no slice
};

// Starts as zeros.
struct TilingState {
  ListState list;
  int count;     // tiles
  int active;    // tiles with slices, where they are listed
  int too_many;  // not 0: there are more tiles than fit
};

enum class Items { none, forward, keys, dq };

// Tiles of one side. Where items are made, also the slices of each tile.
struct TilingJob {
  int side;  // of TilesJob::sides
  int size, most;
  FullTiles full;
  Items kind;
  TilingState* state;
  TileIndex index;
  // Written by cut_tiles.
  RowBits *runs, *held, *tiles;    // [words] of TileIndex, and rows in slices
  int *run_before, *tiles_before;  // [words]
  int2* ranges;                    // [most] {begin, end}; unless `full` is from_end, ~end for rows in no slice
  // Written by fill_tiles.
  Index capacity;      // entries of slices
  WorkSlice* slices;   // [capacity]
  int2* members;       // [most] a tile's range of slices
  int *first, *costs;  // [most] first tile of a tile's run, and there the cost of the run's most expensive tile
  std::uint8_t* cost;  // [most] that cost once more, when tiles are sorted
  int* order;          // [most]
  void* items;         // [most] as `kind` says
  int2* unseen;        // [most] Items::keys: ranges without slices. Starts as zeros

  __device__ int2 range(int tile) const {
    const int2 r = ranges[tile];
    return {r.x, r.y < 0 ? ~r.y : r.y};
  }
};

struct TilesJob {
  static constexpr int kMostTilings = 3;

  const DeviceSlice* slices;
  const std::int32_t* slice_count;
  int slice_capacity;
  int q_rows, k_rows;
  int side_count, tiling_count;
  SideMarks sides[2];  // queries, keys
  TilingJob tilings[kMostTilings];
  Reporter reporter;

  __device__ int count() const { return min(*slice_count, slice_capacity); }
  // A slice that shows nothing has no query rows.
  __device__ WorkSlice slice(int i) const {
    const DeviceSlice s = slices[i];
    return work_slice_within({s.q_begin, s.q_end, s.k_begin, s.k_end, s.lo, s.hi}, q_rows, k_rows);
  }
  __device__ static int2 rows_of(const WorkSlice& s, int side) {
    return side == 0 ? int2{s.q_begin, s.q_end} : int2{s.k_begin, s.k_end};
  }
  __device__ bool fails() const {
    for (int n = 0; n < tiling_count; ++n)
      if (tilings[n].state->too_many != 0) return true;
    return false;
  }
};

}  // namespace weft::cuda::sm90
