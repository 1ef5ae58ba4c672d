// Work lists built on the device, from slices whose number the host does not know.
#pragma once

#include "kernel/cuda/work/list.h"

namespace weft::cuda {

// Entries that no plan of so many slices can exceed, if no row lies in more than `per_row` of them: a slice has one
// more entry for each tile boundary that it crosses.
inline Index work_capacity(Index slices, Index tiles, Index per_row) {
  return slices == 0 ? 0 : slices + max_of(0, tiles - 1) * per_row;
}

// The same lists as HostLists makes, except that the order of tiles, most expensive first, is exact only to a quarter.
// A memset and two launches, for up to two tilings; can be captured together with its memory. Throws what the plan's
// context has to report. Slices that do not fit (an uploaded plan that changed under a graph) are a fault, and then no
// tile has any.
WorkLists build_lists(DevicePlan& plan, std::span<const Tiling> tilings, const HeadGroups& heads, cudaStream_t stream);

}  // namespace weft::cuda
