// The work of a Hopper backward: tiles of query rows, and which slices touch which tile of keys.
//
// From slices on the host both tilings begin anew where no slice goes on, so that tiles belong to one document. Key
// tiles of a document follow each other, those of the longest one first, so that the dQ that is being added to stays in
// the L2 cache; within a document the most expensive first. K/V heads come one after another for the same reason, but
// for items so long that they would end after all others. From a device_plan tiles lie on a fixed grid.
#pragma once

#include "kernel/cuda/sm90/backward/dq_order.h"
#include "kernel/cuda/work/list.h"

namespace weft::cuda::sm90 {

// Rows that overlapping slices hold together, cut into tiles.
struct Component {
  int begin, end;
  int first_tile;
};
struct Cut {
  std::vector<int> ranges;            // of tiles: begin and end
  std::vector<Component> components;  // without those that no slice holds
  std::vector<int> component_of;      // of each slice
  int tiles() const { return static_cast<int>(ranges.size() / 2); }
};

class BackwardWork {
 public:
  // tiles_of_dq: of rows that are one item of dQ, for the same bits always; 0: no such items. Has what goes before the
  // products;
  BackwardWork(const BackwardArgs& args, const BackwardShape& shape, int log2_heads, int dq_tiles_per_item,
               cudaStream_t stream);
  // the rest, while that is under way.
  void add_keys(int sm_count, cudaStream_t stream);
  std::size_t bytes() const { return (first_.size() + second_.size()) * sizeof(int); }  // on the device

  QueryTiles rows = {};
  const int2* unseen = nullptr;  // as in PrepareCall
  int unseen_tiles = 0;
  KeyTiles keys = {};
  WorkHeads heads = {};
  bool ordered_dq =
      false;  // the same bits by Dq::in_turn: lists from the host, if 64 MiB hold all turns and windows are wide
  // Otherwise: of dQ by the owner of its rows; items are null with a device_plan.
  const DqItem* dq_items = nullptr;
  const WorkSlice* dq_slices = nullptr;
  int dq_active = 0;
  int* counter = nullptr;  // at 0; null with a device_plan

 private:
  void cut_slices(const BackwardArgs& args, cudaStream_t stream);
  bool suits_ordered_dq() const;
  std::vector<ComponentItems> components_of(const std::vector<int>& tiles, const std::vector<int>& component_of_tile,
                                            const std::vector<Index>& cost, int sm_count) const;

  BackwardShape shape_;
  int dq_tiles_per_item_;
  Index heads_k_, units_of_head_;
  WorkLists lists_;  // of a device_plan
  std::vector<WorkSlice> slices_;
  Cut rows_, keys_;
  StreamArray<int> first_, second_;
};

}  // namespace weft::cuda::sm90
