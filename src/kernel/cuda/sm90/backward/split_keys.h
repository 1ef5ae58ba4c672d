// Tiles of keys that are seen by so many rows that one block would compute longer than all others together: a short
// prompt with many answers. Their rows are divided among several items, each with its own part of dK and dV, and the
// parts are added up in order afterwards, so that the bits are the same on every run.
#pragma once

#include <vector>

#include "kernel/cuda/sm90/backward/params.h"

namespace weft::cuda::sm90 {

// Tiles of keys with their slices, before they have an order.
struct KeyItems {
  std::vector<int> ranges;            // begin and end of each tile
  std::vector<int> component;         // of each tile
  std::vector<Index> cost;            // of each tile: query rows that see it
  std::vector<int> begin;             // [tiles + 1] of each tile's slices among the members
  std::vector<WorkSlice> members;     // with tile_shift
  std::vector<SplitTile> split = {};  // tiles that became several, which follow each other here
  std::vector<int> parts = {};  // [members] the part of the tile whose slices begin there, or -1; empty: none is split

  std::size_t tiles() const { return cost.size(); }
  int part_count() const { return split.empty() ? 0 : split.back().first_part + split.back().parts; }
};

// Divides tiles that more than `most` rows see, at tiles of 2^log2_size query rows.
void split_long_tiles(KeyItems& items, Index most, int log2_size);

}  // namespace weft::cuda::sm90
