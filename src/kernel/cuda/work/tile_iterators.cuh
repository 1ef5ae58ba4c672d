// Iterators over the tiles of a block's work: while (more) { ... more = next(); }. All threads of a block iterate
// alike.
#pragma once

#include "kernel/cuda/work/work.h"

namespace weft::cuda {

enum class Visibility { none, partial, full };

// What query rows a .. b see of keys c .. d (both ends included) in a slice.
__device__ inline Visibility visibility_of(const WorkSlice& s, int a, int b, int c, int d) {
  if (a >= s.q_begin && b < s.q_end && c >= s.k_begin && d < s.k_end && c - b >= s.lo && d - a <= s.hi)
    return Visibility::full;
  a = max(a, s.q_begin), b = min(b, s.q_end - 1), c = max(c, s.k_begin), d = min(d, s.k_end - 1);
  return a <= b && c <= d && d - a >= s.lo && c - b <= s.hi ? Visibility::partial : Visibility::none;
}

// Keys that row q sees, both ends included, relative to `base`; rows outside the slice see none.
struct VisibleRange {
  int first, last;
};
__device__ inline int within_int(long long x) {
  return static_cast<int>(x < -0x7fffffffLL ? -0x7fffffffLL : x > 0x7fffffffLL ? 0x7fffffffLL : x);
}
__device__ inline VisibleRange visible_keys(const WorkSlice& s, int q, int base) {
  if (q < s.q_begin || q >= s.q_end) return {1, 0};
  const long long wide = q;
  return {within_int(max(static_cast<long long>(s.k_begin), wide + s.lo) - base),
          within_int(min(static_cast<long long>(s.k_end) - 1, wide + s.hi) - base)};
}
// Query rows that see key k.
__device__ inline VisibleRange visible_rows(const WorkSlice& s, int k, int base) {
  if (k < s.k_begin || k >= s.k_end) return {1, 0};
  const long long wide = k;
  return {within_int(max(static_cast<long long>(s.q_begin), wide - s.hi) - base),
          within_int(min(static_cast<long long>(s.q_end) - 1, wide - s.lo) - base)};
}

// Iterators hold little and read slices again where they need them: registers are more expensive than loads that hit
// L1.

// volatile, so that the compiler keeps neither the slice nor its address in registers.
__device__ inline WorkSlice read(const WorkSlice* slices, int n) {
  WorkSlice s;
  asm volatile(
      "{\n.reg .u64 at;\nmad.wide.s32 at, %8, 32, %9;\n"
      "ld.global.v4.s32 {%0,%1,%2,%3}, [at];\nld.global.v4.s32 {%4,%5,%6,%7}, [at + 16];\n}\n"
      : "=r"(s.q_begin), "=r"(s.q_end), "=r"(s.k_begin), "=r"(s.k_end), "=r"(s.k_first), "=r"(s.lo), "=r"(s.hi),
        "=r"(s.tile_shift)
      : "r"(n), "l"(slices));
  return s;
}

// A count that the device made, or `otherwise` where there is none because the host knows it. volatile like the read of
// a slice, and for the same reason.
__device__ inline int count_at(const int* count, int otherwise) {
  if (count == nullptr) return otherwise;
  int n;
  asm volatile("ld.global.s32 %0, [%1];\n" : "=r"(n) : "l"(count));
  return n;
}

// Iterates over the tiles of kKeys keys that query rows [row, row + kRows) see, slice by slice.
template <int kKeys, int kRows>
class KeyTileIterator {
 public:
  __device__ KeyTileIterator(const WorkList& list, int tile) : list_(list), tile_(tile), member_(list.ranges[tile].x) {}

  __device__ bool start() { return enter(); }
  __device__ bool next() {
    base_ += kKeys;
    if (base_ < stop_) return true;
    ++member_;
    return enter();
  }
  __device__ WorkSlice slice() const { return read(list_.slices, member_); }
  __device__ int base() const { return base_; }
  // Keys of the tile that may be read: those that some row of the slice sees.
  __device__ auto valid() const {
    const WorkSlice s = slice();
    const int first = s.k_begin - base_, end = s.k_end - base_;
    return [=](int r) { return r >= first && r < end; };
  }

 private:
  __device__ bool enter() {
    const int row = tile_ * kRows;
    for (const int end = list_.ranges[tile_].y; member_ < end; ++member_) {
      const WorkSlice s = slice();
      const long long first = max(s.q_begin, row), last = min(s.q_end, row + kRows) - 1;
      const int begin = within_int(max(static_cast<long long>(s.k_begin), first + s.lo));
      stop_ = within_int(min(static_cast<long long>(s.k_end), last + s.hi + 1));
      base_ = s.k_first + (begin - s.k_first) / kKeys * kKeys;
      if (first <= last && begin < stop_) return true;
    }
    return false;
  }

  const WorkList& list_;
  int tile_, member_, base_, stop_;
};

// Iterates over the tiles of kRows query rows that see keys [key, key + kKeys), for each query head of the K/V head.
template <int kRows, int kKeys>
class QueryTileIterator {
 public:
  __device__ QueryTileIterator(const WorkList& list, const WorkHeads& heads, int tile, int kv_head)
      : list_(list), heads_(heads), tile_(tile), head_(heads.begin[kv_head]), kv_head_(kv_head) {}

  __device__ bool start() {
    member_ = list_.ranges[tile_].x;
    return head_ < heads_.begin[kv_head_ + 1] && enter();
  }
  __device__ bool next() {
    base_ += kRows;
    if (base_ < stop_) return true;
    ++member_;
    return enter();
  }
  __device__ WorkSlice slice() const { return read(list_.slices, member_); }
  __device__ int base() const { return base_; }
  __device__ int head() const { return heads_.heads[head_]; }
  __device__ auto valid() const {
    const WorkSlice s = slice();
    const int first = s.q_begin - base_, end = s.q_end - base_;
    return [=](int r) { return r >= first && r < end; };
  }

 private:
  __device__ bool enter() {
    const int key = tile_ * kKeys;
    while (true) {
      for (const int end = list_.ranges[tile_].y; member_ < end; ++member_) {
        const WorkSlice s = slice();
        const long long first = max(s.k_begin, key), last = min(s.k_end, key + kKeys) - 1;
        const int begin = within_int(max(static_cast<long long>(s.q_begin), first - s.hi));
        stop_ = within_int(min(static_cast<long long>(s.q_end), last - s.lo + 1));
        base_ = begin / kRows * kRows;
        if (first <= last && begin < stop_) return true;
      }
      if (++head_ >= heads_.begin[kv_head_ + 1]) return false;
      member_ = list_.ranges[tile_].x;
    }
  }

  const WorkList& list_;
  const WorkHeads& heads_;
  int tile_, head_, kv_head_, member_, base_, stop_;
};

// Does a slice of the tile contain the row, so that it sees a key?
__device__ inline bool row_is_live(const WorkList& list, int tile, int row) {
  const int2 range = list.ranges[tile];
  for (int m = range.x; m < range.y; ++m) {
    const WorkSlice& s = list.slices[m];
    if (row >= s.q_begin && row < s.q_end) return true;
  }
  return false;
}
__device__ inline bool key_is_live(const WorkList& list, int tile, int key) {
  const int2 range = list.ranges[tile];
  for (int m = range.x; m < range.y; ++m) {
    const WorkSlice& s = list.slices[m];
    if (key >= s.k_begin && key < s.k_end) return true;
  }
  return false;
}

}  // namespace weft::cuda
