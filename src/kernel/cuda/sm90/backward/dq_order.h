// The order of additions to each tile of dQ, for Dq::ordered.
//
// A visit is one slice of one item that meets one tile of queries. Visits of a tile are numbered in the order in which
// items are claimed, and within an item in the order of QueryStepIterator. So a visit waits only for items that were
// claimed before its own, and there is no deadlock.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernel/cuda/sm90/backward/params.h"

namespace weft::cuda::sm90 {

// Numbers of visits, for items {first key, end, first slice, end} as in KeyTiles; sets k_first of the slices.
std::vector<int> number_additions(std::span<const int> items, std::span<WorkSlice> slices, int log2_size, int tiles);

// Items (head · tiles + tile) head by head, tiles in their order, except that an item that would end after the mean
// time of an SM starts as much earlier. Empty if there is no such item.
std::vector<int> order_items(const std::vector<Index>& costs, Index heads, int sm_count);

// Items of one component (keys that overlapping slices connect) add to the same tiles in order: claimed together, each
// would wait for the one before. So items of other heads and components are claimed between them, but no more than
// necessary, because their dQ has to stay in the L2 cache.
struct ComponentItems {
  int begin, end;  // in the order of items
  Index between;   // items from one to the next: 1 or more
};
// Components that need more than `heads` items between are interleaved and become one.
std::vector<int> spread_components(const std::vector<int>& items, std::vector<ComponentItems>& components, Index heads);
// As order_items, component by component, interleaving as many heads as they need. Items of a head keep their order.
std::vector<int> order_for_ordered_dq(const std::vector<ComponentItems>& components, Index heads);

}  // namespace weft::cuda::sm90
