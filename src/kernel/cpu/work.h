// How a call is cut into pieces that threads can take: by K/V head and rows. Nothing here depends on the number of
// threads, so neither do results.
#pragma once

#include <span>
#include <vector>

#include "weft/attention.h"
#include "weft/slice.h"

namespace weft::cpu {

// A K/V head and the query heads that use it. A tile stacks them, so that K and V are read once for all.
struct HeadGroup {
  Index kv_head = 0;
  std::vector<Index> heads;
};
std::vector<HeadGroup> head_groups(Index heads_q, Index heads_k, std::span<const Index> head_map);
Index largest_group(std::span<const HeadGroup> groups);

// Query rows [rows.begin, rows.end) and the slices that touch them, by index, in the order they were given.
struct RowTile {
  Range rows;
  std::vector<Index> slices;
  Index pairs = 0;  // visible, roughly: what the tile costs
};

// Slices without rows that see nothing; keys are cut at the end only, because tiles count from k_begin.
std::vector<Slice> useful_slices(std::span<const Slice> slices);
// Tiles of `size` rows over all rows [0, rows); those in no slice too, since their outputs have to be written.
std::vector<RowTile> row_tiles(std::span<const Slice> slices, Index rows, Index size);

// One item of work for a thread: a tile for a group of heads.
struct Item {
  Index tile = 0, group = 0, cost = 0;
};
// The most expensive first, so that no thread ends with a long one.
std::vector<Item> forward_items(std::span<const RowTile> tiles, std::span<const HeadGroup> groups);

// How a backward call is cut: into components that share neither query rows nor keys, and those that are large into
// parts that share keys but no rows. Nothing depends on the number of threads, so gradients have the same bits always.

// A slice's keys and where its gradients lie: sum row = key row + shift.
struct KeyPlace {
  Index slice = 0, shift = 0;
};

struct RowPart {
  std::vector<Range> blocks;  // of query rows
  Range sums;                 // rows of the sums that these touch; the part keeps no others
};

struct Component {
  std::vector<KeyPlace> slices;
  std::vector<Range> keys;  // touched, sorted, apart from each other; sums hold them one after another
  Index sum_rows = 0;       // rows of the sums
  std::vector<RowPart> parts;
  Index pairs = 0;
};

// Blocks of at most `block` query rows, for `groups` groups of heads. A part of one group is about a sixteenth of the
// whole call, or a component if that is less: more parts would share work among more threads, but each has its own
// sums.
std::vector<Component> components(std::span<const Slice> slices, Index block, Index groups);

}  // namespace weft::cpu
