// Tiles and items from a device_plan: what the host makes of slices, made on the device, so that a graph can hold it.
//
// How many tiles there are, only the device knows. The host knows the most: buffers have room for them, and blocks past
// the count return. A memset and three launches. Throws what the plan's context has to report. Slices that do not fit
// (a plan that changed under a graph) are a fault, and then no tile of that tiling has any; with too many tiles, none
// of any tiling.
#pragma once

#include "kernel/cuda/sm90/backward/params.h"
#include "kernel/cuda/sm90/forward/params.h"
#include "kernel/cuda/work/list.h"

namespace weft::cuda::sm90 {

template <class Item>
struct DeviceItems {
  const Item* items = nullptr;  // in the order of work
  const WorkSlice* slices = nullptr;
  int most = 0;
  const int* count = nullptr;
};

// Tiles of at most `size` query rows, which end where no slice continues. Short neighbours share a tile by begins_tile
// (cut.h), where the host fills a tile as far as it goes. And `counters` zeros, which need no memset of their own.
struct DeviceForwardTiles {
  StreamArray<int> memory;
  DeviceItems<ForwardItem> tiles;
  WorkHeads heads = {};
  int* counters = nullptr;
};
int most_forward_tiles(DevicePlan& plan, int size);
DeviceForwardTiles build_forward_tiles(DevicePlan& plan, int size, const HeadGroups& heads, int counters,
                                       cudaStream_t stream);

struct BackwardSizes {
  int log2_size, keys;  // tiles of 2^log2_size query rows and of `keys` keys
  int dq_tiles;         // query tiles of an item of the separate dQ kernel; 0: there is none
};
// Both sides' tiles, which end where no slice continues. The most unseen tiles are as many as tiles of keys.
struct DeviceBackwardTiles {
  StreamArray<int> memory;
  const int2* rows = nullptr;  // as QueryTiles::ranges
  int most_rows = 0;
  const int* row_count = nullptr;
  DeviceItems<int4> keys;
  const int2* unseen = nullptr;  // as in BackwardParams
  DeviceItems<DqItem> dq;
  WorkHeads heads = {};
};
DeviceBackwardTiles build_backward_tiles(DevicePlan& plan, const BackwardSizes& sizes, const HeadGroups& heads,
                                         cudaStream_t stream);

// What the host can say of a slice's query rows: all rows over the most ranges of them that slices may connect.
Index mean_rows_of(DevicePlan& plan);

}  // namespace weft::cuda::sm90
