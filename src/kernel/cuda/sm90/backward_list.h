// The work of a Hopper backward: which slices touch which tile of keys, and tiles of query rows.
#pragma once

#include "kernel/cuda/list.h"
#include "kernel/cuda/sm90/backward_call.h"

namespace weft::cuda::sm90 {

struct BackwardWork {
  StreamArray<int> memory;
  CallLists lists;  // of a device_plan: tiles lie on a fixed grid
  QueryTiles rows = {};
  KeyTiles keys = {};
  const int2* unseen = nullptr;  // as in PrepareCall
  int unseen_tiles = 0;
  WorkHeads heads = {};
  // Of dQ by the owner of its rows, if that was asked for; items are null with a device_plan.
  const DqItem* dq_items = nullptr;
  const WorkSlice* dq_slices = nullptr;
  int dq_active = 0;
};

// From slices on the host both tilings begin anew where no slice goes on, so that tiles belong to one document. Key tiles
// of a document follow each other, those of the longest one first, so that the dQ that is being added to stays in the L2
// cache; within a document the most expensive first. tiles_of_dq: of rows that are one item of dQ; 0: no such items.
BackwardWork make_backward_work(const BackwardArgs& args, int log_size, int log_heads, int tiles_of_dq,
                                cudaStream_t stream);

}  // namespace weft::cuda::sm90
