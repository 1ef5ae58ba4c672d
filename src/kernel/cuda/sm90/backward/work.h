// The work of a backward call: tiles of query rows, and the slices that touch each tile of keys.
//
// From slices on the host both tilings restart where no slice continues, so that a tile belongs to one document. Key
// tiles of a document follow each other, those of the longest document first, so that the dQ they add to stays in the
// L2 cache; within a document the most expensive tile comes first. In a tree each node's keys are what a document's
// are, and the nodes of a subtree whose dQ fits in the L2 cache follow each other. K/V heads follow each other for the
// same reason, except for items so long that they would end after all others. With a device_plan the device cuts the
// same tiles (lists/device_tiles.h) and orders those of keys by document; heads follow each other.
#pragma once

#include "kernel/cuda/sm90/backward/dq_order.h"
#include "kernel/cuda/sm90/backward/split_keys.h"
#include "kernel/cuda/sm90/lists/device_tiles.h"
#include "kernel/cuda/work/list.h"

namespace weft::cuda::sm90 {

// Rows that overlapping slices connect, usually a document, cut into tiles.
struct Component {
  int begin, end;
  int first_tile;
};
struct Cut {
  std::vector<int> ranges;            // begin and end of each tile
  std::vector<Component> components;  // without rows in no slice
  std::vector<int> component_of;      // of each slice
  int tiles() const { return static_cast<int>(ranges.size() / 2); }
};

// Groups components of keys whose query rows overlap, such as the nodes of a subtree, as long as the first one has at
// most `most` rows. Returns the group of each component, which is the number of one of them.
std::vector<int> group_components(std::span<const WorkSlice> slices, const Cut& keys, Index most);

class BackwardWork {
 public:
  // dq_tiles_per_item: query tiles of an item of the separate dQ kernel; 0 if dQ need not have the same bits on every
  // run. Prepares what comes before the backward kernel.
  BackwardWork(const KernelBackwardArgs& args, const BackwardShape& shape, int log2_heads, int dq_tiles_per_item,
               cudaStream_t stream);
  // Prepares the rest, while the first kernel runs.
  void add_keys(int sm_count, cudaStream_t stream);
  std::size_t bytes() const { return (first_.size() + second_.size()) * sizeof(int); }  // in device memory

  QueryTiles rows = {};
  const int2* unseen = nullptr;  // as in BackwardParams
  int unseen_tiles = 0;
  KeyTiles keys = {};
  WorkHeads heads = {};
  // Dq::ordered is used for the same bits on every run: with lists from the host, if 64 MiB hold all order numbers and
  // windows are wide.
  bool ordered_dq = false;
  // Otherwise items of the separate dQ kernel.
  const DqItem* dq_items = nullptr;
  const WorkSlice* dq_slices = nullptr;
  int dq_active = 0;
  const int* dq_count = nullptr;  // as in DqParams
  // Tiles of keys that several items share, and the number of their parts.
  const SplitTile* split_tiles = nullptr;
  int split_count = 0, part_count = 0;
  int* counter = nullptr;  // set to 0; null with a device_plan

 private:
  void build_on_device(const KernelBackwardArgs& args, cudaStream_t stream);
  void cut_slices(const KernelBackwardArgs& args, cudaStream_t stream);
  bool suits_ordered_dq() const;
  KeyItems key_items() const;
  void split_long(KeyItems& items, int sm_count) const;
  // Brings key tiles into the order of work.
  void sort_tiles(std::vector<int>& order, const KeyItems& items) const;
  std::vector<ComponentItems> components_of(const std::vector<int>& tiles, const std::vector<int>& component_of_tile,
                                            const std::vector<Index>& cost, int sm_count) const;

  BackwardShape shape_;
  int dq_tiles_per_item_;
  bool can_split_;
  Index heads_k_, units_of_head_;
  bool on_device_ = false;
  std::vector<WorkSlice> slices_;
  Cut rows_, keys_;
  StreamArray<int> first_, second_;
};

}  // namespace weft::cuda::sm90
