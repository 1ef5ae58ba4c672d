// Work lists from slices in device memory, made there: how many slices there are, the host does not know.
#pragma once

#include "kernel/cuda/work/list.h"

namespace weft::cuda {

// Entries that no plan of so many slices can exceed, if no row lies in more than `per_row` of them: a slice has one
// more for each end of a tile that it passes.
inline Index work_capacity(Index slices, Index tiles, Index per_row) {
  return slices == 0 ? 0 : slices + max_of(0, tiles - 1) * per_row;
}

// The lists that HostLists makes of the same slices, but for the order of tiles: the dearest first within about a
// quarter. A memset and two launches, for up to two tilings; may be captured, memory and all. Throws what the plan's
// context has to report. Slices that do not fit (an uploaded plan that changed under a graph) are a fault: no tile has
// any then.
WorkLists build_lists(DevicePlan& plan, std::span<const Tiling> tilings, const HeadGroups& heads, cudaStream_t stream);

}  // namespace weft::cuda
