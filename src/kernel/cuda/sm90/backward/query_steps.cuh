// Steps: what the producer tells the consumers about a tile of queries, and how it iterates over a key tile's slices.
#pragma once

#include "kernel/cuda/sm90/backward/params.h"
#include "kernel/cuda/work/tile_iterators.cuh"

namespace weft::cuda::sm90 {

// One tile of queries for one tile of keys. Rows and keys are relative to the tiles' first ones.
struct QueryStep {
  enum Flag : int {
    kLast = 1,      // last step of its key tile
    kMasked = 2,    // not every row sees every key
    kZeroFill = 4,  // rows outside the slice are set to zero
    // One bit per consumer warpgroup, for two:
    kNextIdle = 8  // no row of the next step sees any of its keys
  };
  int flags;
  int rows;  // rows of the slice: begin | end << 16
  int keys;  // keys of the slice: begin | end << 16
  int band;  // lo | hi << 16: key k is seen by rows k - hi .. k - lo
  int sums;  // index of the tile of dQ

  __device__ static int pair(int low, int high) { return (low & 0xffff) | (high << 16); }
  __device__ static int low(int pair) { return static_cast<short>(pair); }
  __device__ static int high(int pair) { return pair >> 16; }
};

// Rows that see a key, both ends included.
__device__ inline VisibleRange visible_rows(const QueryStep& step, int key) {
  if (key < QueryStep::low(step.keys) || key >= QueryStep::high(step.keys)) return {1, 0};
  return {max(QueryStep::low(step.rows), key - QueryStep::high(step.band)),
          min(QueryStep::high(step.rows) - 1, key - QueryStep::low(step.band))};
}

// A tile of at most kKeys keys, its slices, and the query heads that use it.
template <int kKeys>
struct KeyItem {
  int begin, end;   // range of keys
  int first, last;  // range of slices: [first, last)
  int head, heads;  // range in WorkHeads::heads: [head, heads)

  __device__ KeyItem(const BackwardParams& params, int tile, int kv_head) {
    const int4 item = params.keys.items[tile];
    begin = item.x, end = item.y, first = item.z, last = item.w;
    if (params.heads.group > 0) {
      head = kv_head * params.heads.group, heads = head + params.heads.group;
    } else {
      head = params.heads.list.begin[kv_head], heads = params.heads.list.begin[kv_head + 1];
    }
  }
  __device__ bool has_work() const { return first < last && head < heads; }
  __device__ bool is_live(const BackwardParams& params, int key) const {
    for (int m = first; m < last; ++m) {
      const WorkSlice& s = params.keys.slices[m];
      if (key >= s.k_begin && key < s.k_end) return true;
    }
    return false;
  }
};

// Iterates over the tiles of queries that see the keys: unit by unit, slice by slice, the last rows first, so that
// blocks that start together add to the same tiles of dQ while those are in the L2 cache. With Dq::ordered all units of
// a tile follow each other: otherwise a block with few rows would wait at the second unit for a block that has many
// rows of the first.
template <int kKeys, bool kOrderedDq>
class QueryStepIterator {
 public:
  __device__ QueryStepIterator(const BackwardParams& params, const KeyItem<kKeys>& item)
      : params_(params), item_(item), member_(item.first), head_(item.head) {}
  __device__ int dq_order() const { return params_.keys.dq_order[slice_.k_first + tile_]; }
  __device__ bool start() { return item_.has_work() && enter(); }
  __device__ bool next() {
    if constexpr (kOrderedDq) {
      head_ += params_.rows.heads();
      if (head_ < item_.heads) return true;
      head_ = item_.head;
    }
    if (--tile_ >= stop_) return true;
    ++member_;
    return enter();
  }
  __device__ int row() const { return (tile_ << params_.rows.log2_size) - slice_.tile_shift; }
  __device__ int head() const { return params_.heads.group > 0 ? head_ : params_.heads.list.heads[head_]; }
  __device__ QueryStep step() const {
    constexpr int kFar = 0x3fff;
    const WorkSlice& s = slice_;
    const int size = params_.rows.size(), row = this->row(), key = item_.begin, keys = item_.end - key;
    // Rows past the tile's end are masked, but must not hold NaN or infinity either.
    int rows = min(size, params_.q_rows - row);
    const bool zero_fill = row < s.q_begin || row + rows > s.q_end;
    if (zero_fill) rows = min(rows, params_.rows.ranges[tile_].y - row);
    const bool all = row >= s.q_begin && row + rows <= s.q_end && key >= s.k_begin && key + kKeys <= s.k_end &&
                     keys == kKeys && key - (row + rows - 1) >= s.lo && key + kKeys - 1 - row <= s.hi;
    const long long shift = static_cast<long long>(row) - key;
    const auto near = [](long long x) { return static_cast<int>(x < -kFar ? -kFar : x > kFar ? kFar : x); };
    return {(all ? 0 : QueryStep::kMasked) | (zero_fill ? QueryStep::kZeroFill : 0),
            QueryStep::pair(max(0, s.q_begin - row), min(size, s.q_end - row)),
            QueryStep::pair(max(0, s.k_begin - key), min(keys, s.k_end - key)),
            QueryStep::pair(near(s.lo + shift), near(s.hi + shift)),
            (head() >> params_.rows.log2_heads) * params_.rows.tiles + tile_};
  }
  // Consumers of whose 64 keys no row sees any, one bit each.
  __device__ int idle() const {
    const WorkSlice& s = slice_;
    const int first = max(row(), s.q_begin), last = min(row() + params_.rows.size(), s.q_end) - 1;
    int bits = 0;
    for (int g = 0; g < 2; ++g) {
      const int first_key = max(item_.begin + 64 * g, s.k_begin),
                last_key = min(min(item_.begin + 64 * g + 64, item_.end), s.k_end) - 1;
      if (first_key > last_key || first_key - last > s.hi || last_key - first < s.lo) bits |= 1 << g;
    }
    return bits;
  }

 private:
  __device__ bool enter() {
    while (true) {
      for (; member_ < item_.last; ++member_) {
        slice_ = read(params_.keys.slices, member_);
        const TileRange tiles = tiles_seeing(slice_, item_.begin, item_.end, params_.rows.log2_size);
        if (tiles.first > tiles.last) continue;
        tile_ = tiles.last;
        stop_ = tiles.first;
        return true;
      }
      if constexpr (kOrderedDq) return false;
      head_ += params_.rows.heads();
      if (head_ >= item_.heads) return false;
      member_ = item_.first;
    }
  }

  const BackwardParams& params_;
  const KeyItem<kKeys>& item_;
  WorkSlice slice_;
  int member_, head_, tile_, stop_;
};

}  // namespace weft::cuda::sm90
