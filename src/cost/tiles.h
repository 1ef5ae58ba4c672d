// Counts tiles of slices that come one by one.
#pragma once

#include <vector>

#include "weft/cost.h"

namespace weft::cost {

class TileCounter {
 public:
  TileCounter(Index heads_q, Index heads_k, const KernelRate& rate);

  // Rows of the slice begin at `first_row` of the buffer that tiles count from.
  void add(const Slice& slice, Index first_row);
  // The same in constant time, to within half a tile at each edge.
  void add_roughly(const Slice& slice);
  bool any() const { return pairs_ > 0; }
  Index pairs() const { return pairs_; }  // of one head
  TileWork take();                        // and begin anew

 private:
  static Range keys_of(const Slice& slice, Index begin, Index end);
  void add_copies(const Slice& slice, Index first_row);
  void add_tiles(const Slice& trimmed, Index first_row);
  void add_rows(Range rows);
  Index take_rows();
  // The tiles of what follows are others: the longest of those so far is kept.
  void end_tiles();

  Index group_, tokens_, keys_;  // heads in a tile, its tokens, its keys
  Index copy_tokens_;            // of rows that share a copy of their keys; 0: there are none
  double heads_, groups_;
  TileWork work_;
  Index pairs_ = 0;
  double longest_ = 0;
  std::vector<Range> rows_ = {};  // of the slices, neighbours joined
  // Covered pairs of one head, by tile: of tile t and, in `from_tile_`, of all tiles from t on. Sums are of whole
  // numbers, so that their order does not matter.
  std::vector<double> by_tile_, from_tile_;
  Range touched_ = {};  // tiles whose numbers are not 0
};

// The work of one K/V head becomes that of `groups` of them.
inline TileWork times(TileWork unit, double groups) {
  unit.pairs *= groups;
  unit.covered *= groups;
  unit.tiles *= groups;
  unit.rows *= groups;
  unit.keys *= groups;
  return unit;
}

// Of a visible pair and query head.
double flops_a_pair(const TensorShape& shape, Pass pass);

}  // namespace weft::cost
