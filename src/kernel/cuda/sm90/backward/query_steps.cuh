// What the fetching warp of the backward tells the others of a tile of queries, and its way through a key tile's
// slices.
#pragma once

#include "kernel/cuda/sm90/backward/call.h"
#include "kernel/cuda/work/walk.cuh"

namespace weft::cuda::sm90 {

// One tile of queries for one tile of keys. Rows and keys are counted from the tiles' first ones.
struct RowStep {
  enum Flag : int {
    kLast = 1,    // of its tile of keys
    kMasked = 2,  // not every row sees every key
    kMended = 4,  // rows outside the slice are made zeros
    // Of a warpgroup's keys, a bit for each of two:
    kNextIdle = 8  // no row of the next step sees any
  };
  int flags;
  int rows;  // begin | end << 16 of the slice
  int keys;  // begin | end << 16
  int band;  // lo | hi << 16: key k is seen by rows k - hi .. k - lo
  int sums;  // tile of dQ

  __device__ static int pair(int low, int high) { return (low & 0xffff) | (high << 16); }
  __device__ static int low(int pair) { return static_cast<short>(pair); }
  __device__ static int high(int pair) { return pair >> 16; }
};

// Rows that see a key, both ends included.
__device__ inline Seen rows_of_key(const RowStep& step, int key) {
  if (key < RowStep::low(step.keys) || key >= RowStep::high(step.keys)) return {1, 0};
  return {max(RowStep::low(step.rows), key - RowStep::high(step.band)),
          min(RowStep::high(step.rows) - 1, key - RowStep::low(step.band))};
}

// A tile of keys (kKeys at most), its slices, and the query heads that use it.
template <int kKeys>
struct KeyItem {
  int begin, end;   // keys
  int first, last;  // slices: [first, last)
  int head, heads;  // in the order of WorkHeads::heads: [head, heads)

  __device__ KeyItem(const BackwardCall& call, int tile, int kv_head) {
    if (call.keys.items != nullptr) {
      const int4 item = call.keys.items[tile];
      begin = item.x, end = item.y, first = item.z, last = item.w;
    } else {
      tile = call.keys.list.order[tile];
      const int2 range = call.keys.list.ranges[tile];
      begin = tile * kKeys, end = min((tile + 1) * kKeys, call.k_rows);
      first = range.x, last = range.y;
    }
    if (call.heads.group > 0) {
      head = kv_head * call.heads.group, heads = head + call.heads.group;
    } else {
      head = call.heads.list.begin[kv_head], heads = call.heads.list.begin[kv_head + 1];
    }
  }
  __device__ bool is_shown() const { return first < last; }
  __device__ bool has_work() const { return first < last && head < heads; }
  __device__ bool is_live(const BackwardCall& call, int key) const {
    for (int m = first; m < last; ++m) {
      const WorkSlice& s = call.keys.list.slices[m];
      if (key >= s.k_begin && key < s.k_end) return true;
    }
    return false;
  }
};

// The tiles of queries that see the keys: unit by unit, slice by slice, the last rows first. Blocks that begin together
// then add to the same tiles of dQ, which are in the L2 cache. In turn all units of a tile come one after another: a
// block with few rows would wait at the second unit for one that has many of the first.
template <int kKeys, bool kInTurn>
class RowWalk {
 public:
  __device__ RowWalk(const BackwardCall& call, const KeyItem<kKeys>& item)
      : call_(call), item_(item), member_(item.first), head_(item.head) {}
  __device__ int turn() const { return call_.keys.turns[slice_.k_first + tile_]; }
  __device__ bool start() { return item_.has_work() && enter(); }
  __device__ bool next() {
    if constexpr (kInTurn) {
      head_ += call_.rows.heads();
      if (head_ < item_.heads) return true;
      head_ = item_.head;
    }
    if (--tile_ >= stop_) return true;
    ++member_;
    return enter();
  }
  __device__ int row() const { return (tile_ << call_.rows.log_size) - slice_.unused; }
  __device__ int head() const { return call_.heads.group > 0 ? head_ : call_.heads.list.heads[head_]; }
  __device__ RowStep step() const {
    constexpr int kFar = 0x3fff;
    const WorkSlice& s = slice_;
    const int size = call_.rows.size(), row = this->row(), key = item_.begin, keys = item_.end - key;
    // Rows behind the tile's own have no share in anything, but what lies there must not be multiplied.
    int rows = min(size, call_.q_rows - row);
    const bool mended = row < s.q_begin || row + rows > s.q_end;
    if (mended && call_.rows.ranges != nullptr) rows = min(rows, call_.rows.ranges[tile_].y - row);
    const bool all = row >= s.q_begin && row + rows <= s.q_end && key >= s.k_begin && key + kKeys <= s.k_end &&
                     keys == kKeys && key - (row + rows - 1) >= s.lo && key + kKeys - 1 - row <= s.hi;
    const long long shift = static_cast<long long>(row) - key;
    const auto near = [](long long x) { return static_cast<int>(x < -kFar ? -kFar : x > kFar ? kFar : x); };
    return {(all ? 0 : RowStep::kMasked) | (mended ? RowStep::kMended : 0),
            RowStep::pair(max(0, s.q_begin - row), min(size, s.q_end - row)),
            RowStep::pair(max(0, s.k_begin - key), min(keys, s.k_end - key)),
            RowStep::pair(near(s.lo + shift), near(s.hi + shift)),
            (head() >> call_.rows.log_heads) * call_.rows.tiles + tile_};
  }
  // Warpgroups of whose 64 keys no row sees any, a bit each.
  __device__ int idle() const {
    const WorkSlice& s = slice_;
    const int first = max(row(), s.q_begin), last = min(row() + call_.rows.size(), s.q_end) - 1;
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
        slice_ = read(call_.keys.list.slices, member_);
        const TileRange tiles = tiles_seeing(slice_, item_.begin, item_.end, call_.rows.log_size);
        if (tiles.first > tiles.last) continue;
        tile_ = tiles.last;
        stop_ = tiles.first;
        return true;
      }
      if constexpr (kInTurn) return false;
      head_ += call_.rows.heads();
      if (head_ >= item_.heads) return false;
      member_ = item_.first;
    }
  }

  const BackwardCall& call_;
  const KeyItem<kKeys>& item_;
  WorkSlice slice_;
  int member_, head_, tile_, stop_;
};

}  // namespace weft::cuda::sm90
