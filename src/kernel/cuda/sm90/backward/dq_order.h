// Whose turn it is to add to a tile of dQ, so that all additions to it have one order.
//
// A visit is one slice of one item that meets one tile of queries. Visits of a tile are numbered in the order in which
// items are handed out, and within an item as RowWalk goes. A visit then waits only for items that were handed out
// before its own: whatever holds these up, it is not this one.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernel/cuda/sm90/backward/params.h"

namespace weft::cuda::sm90 {

// Numbers of visits, for items of {first key, end, first slice, last} as in KeyTiles; slices get their k_first.
std::vector<int> number_additions(std::span<const int> items, std::span<WorkSlice> slices, int log2_size, int tiles);

// Items (head · tiles + tile) head by head, tiles in their order, except that one which would end after the time that
// all work takes, spread evenly, begins as much earlier. None at all if there is no such item.
std::vector<int> order_items(const std::vector<Index>& costs, Index heads, int sm_count);

// Items of one part (keys that overlapping slices hold together) add to the same tiles, one after another: handed out
// at once, each would wait for the one before. So others are handed out between them, of other heads and of other
// parts, but no more than that needs: their dQ has to stay in the L2 cache.
struct ComponentItems {
  int begin, end;  // in the order of items
  Index between;   // items from one to the next: 1 or more
};
// Items of parts of which more than `heads` are needed take turns, and become one part.
std::vector<int> spread_components(const std::vector<int>& items, std::vector<ComponentItems>& components, Index heads);
// As order_items, for parts one after another with as many heads side by side as they need. Items of a head keep their
// order.
std::vector<int> order_for_ordered_dq(const std::vector<ComponentItems>& components, Index heads);

}  // namespace weft::cuda::sm90
