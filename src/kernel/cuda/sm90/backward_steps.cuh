// What the fetching warp of the backward tells the others of a tile of queries, and its way through a key tile's slices.
#pragma once

#include "kernel/cuda/sm90/backward_call.h"
#include "kernel/cuda/walk.cuh"

namespace weft::cuda::sm90 {

// One tile of queries for one tile of keys. Rows and keys are counted from the tiles' first ones.
struct RowStep {
  enum Flag : int {
    kLast = 1,    // of its tile of keys
    kMasked = 2,  // not every row sees every key
    kMended = 4   // rows outside the slice are made zeros
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

// The tiles of queries that see keys [key, key + keys): unit by unit, slice by slice, the last rows first. Blocks that
// begin together then add to the same tiles of dQ, which are in the L2 cache.
class RowWalk {
 public:
  __device__ RowWalk(const BackwardCall& call, int tile, int kv_head, int key, int keys)
      : call_(call), key_(key), keys_(keys) {
    const int2 range = call.keys.ranges[tile];
    first_ = member_ = range.x;
    end_ = range.y;
    head_ = call.heads.begin[kv_head];
    last_head_ = call.heads.begin[kv_head + 1];
  }
  __device__ bool start() { return head_ < last_head_ && enter(); }
  __device__ bool next() {
    if (--tile_ >= stop_) return true;
    ++member_;
    return enter();
  }
  __device__ int row() const { return (tile_ << call_.rows.log_size) - slice_.unused; }
  __device__ int head() const { return call_.heads.heads[head_]; }
  __device__ RowStep step() const {
    constexpr int kFar = 0x3fff;
    const WorkSlice& s = slice_;
    const int size = call_.rows.size(), row = this->row();
    // Rows behind the tile's own have no share in anything, but what lies there must not be multiplied.
    int rows = min(size, call_.q_rows - row);
    const bool mended = row < s.q_begin || row + rows > s.q_end;
    if (mended && call_.rows.ranges != nullptr) rows = min(rows, call_.rows.ranges[tile_].y - row);
    const bool all = row >= s.q_begin && row + rows <= s.q_end && key_ >= s.k_begin &&
                     key_ + BackwardShape::kKeys <= s.k_end && keys_ == BackwardShape::kKeys &&
                     key_ - (row + rows - 1) >= s.lo && key_ + BackwardShape::kKeys - 1 - row <= s.hi;
    const long long shift = static_cast<long long>(row) - key_;
    const auto near = [](long long x) { return static_cast<int>(x < -kFar ? -kFar : x > kFar ? kFar : x); };
    return {(all ? 0 : RowStep::kMasked) | (mended ? RowStep::kMended : 0),
            RowStep::pair(max(0, s.q_begin - row), min(size, s.q_end - row)),
            RowStep::pair(max(0, s.k_begin - key_), min(keys_, s.k_end - key_)),
            RowStep::pair(near(s.lo + shift), near(s.hi + shift)),
            (head() >> call_.rows.log_heads) * call_.rows.tiles + tile_};
  }

 private:
  __device__ bool enter() {
    while (true) {
      for (; member_ < end_; ++member_) {
        slice_ = read(call_.keys.slices, member_);
        const WorkSlice& s = slice_;
        const long long first = max(s.k_begin, key_), last = min(s.k_end, key_ + keys_) - 1;
        const int begin = within_int(max(static_cast<long long>(s.q_begin), first - s.hi));
        const int end = within_int(min(static_cast<long long>(s.q_end), last - s.lo + 1));
        if (first > last || begin >= end) continue;
        tile_ = (end - 1 + s.unused) >> call_.rows.log_size;
        stop_ = (begin + s.unused) >> call_.rows.log_size;
        return true;
      }
      head_ += call_.rows.heads();
      if (head_ >= last_head_) return false;
      member_ = first_;
    }
  }

  const BackwardCall& call_;
  WorkSlice slice_;
  int key_, keys_, first_, member_, end_, head_, last_head_, tile_, stop_;
};

}  // namespace weft::cuda::sm90
