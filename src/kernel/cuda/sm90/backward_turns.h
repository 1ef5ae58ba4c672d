// Whose turn it is to add to a tile of dQ, so that all additions to it have one order.
//
// A visit is one slice of one item that meets one tile of queries. Visits of a tile are numbered in the order in which items
// are handed out, and within an item as RowWalk goes. A visit then waits only for items that were handed out before its
// own: whatever holds these up, it is not this one.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernel/cuda/sm90/backward_call.h"

namespace weft::cuda::sm90 {

// Numbers of visits, for items of {first key, end, first slice, last} as in KeyTiles; slices get their k_first.
std::vector<int> number_turns(std::span<const int> items, std::span<WorkSlice> slices, int log_size, int tiles);

// Items (head · tiles + tile) head by head, tiles in their order, except that one which would end after the time that all
// work takes, spread evenly, begins as much earlier; `in_turn`: with those before it of its head. None at all if there is no
// such item.
std::vector<int> order_items(const std::vector<Index>& costs, Index heads, int processors, bool in_turn);

}  // namespace weft::cuda::sm90
