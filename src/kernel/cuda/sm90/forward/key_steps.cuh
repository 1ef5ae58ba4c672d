// Steps: what the producer tells the consumers about a tile of keys, and how it iterates over a query tile's slices.
#pragma once

#include "kernel/cuda/sm90/forward/params.h"
#include "kernel/cuda/work/tile_iterators.cuh"

namespace weft::cuda::sm90 {

// One tile of keys for one tile of queries. Rows and keys are relative to the tiles' first ones.
struct alignas(16) Step {
  enum Flag : int {
    kFirst = 1,     // first step of its query tile
    kLast = 2,      // last step of its query tile
    kZeroFill = 4,  // keys outside the slice are set to zero in V
    kStop = 8,      // there is no more work
    kEnds = 16,     // no later call of QuerySteps has keys for this query tile
    // One bit per consumer warpgroup, for up to three:
    kMasked = 1 << 5,  // not all of its rows see every key
    kIdle = 1 << 24,   // none of its rows sees any key; implies kMasked
    kHalf = 1 << 27,   // none of its rows sees a key of the second half; implies kMasked
    // Alternates between successive steps in the same pipeline stage, starting with 1: tells a fresh step from the
    // stale one.
    kPhase = 1 << 30
  };
  int flags;
  int rows;  // rows of the slice: begin | end << 16
  int keys;  // keys of the slice: begin | end << 16
  int band;  // lo | hi << 16: row r sees keys lo + r .. hi + r

  // A step whose keys nobody sees.
  __device__ static Step empty() { return {kZeroFill | 7 * kMasked, 0, 0, 0}; }
  __device__ static int phase_flag(unsigned phase) { return phase == 0 ? kPhase : 0; }

  __device__ static int pair(int low, int high) { return (low & 0xffff) | (high << 16); }
  __device__ static int low(int pair) { return static_cast<short>(pair); }
  __device__ static int high(int pair) { return pair >> 16; }
};
// The query tile of a step: first row, rows | unit << 8, index, and split | splits << 16. Index and split are read only
// where they are used.
struct QueryTile {
  int row, rows_unit, tile, split_of;

  __device__ int rows() const { return rows_unit & 0xff; }
  __device__ int unit() const { return rows_unit >> 8; }
  __device__ int split() const { return split_of & 0xffff; }
  __device__ int splits() const { return split_of >> 16; }
};

__device__ inline int clamped(long long x, int least, int most) {
  return static_cast<int>(x < least ? least : x > most ? most : x);
}

// Keys that a row sees, both ends included.
__device__ inline VisibleRange visible_keys(const Step& step, int row) {
  if (row < Step::low(step.rows) || row >= Step::high(step.rows)) return {1, 0};
  return {max(Step::low(step.keys), Step::low(step.band) + row),
          min(Step::high(step.keys) - 1, Step::high(step.band) + row)};
}

// The n-th query tile in the order of work.
__device__ inline ForwardItem item_of(const ForwardParams& params, int n) {
  ForwardItem item;  // four independent loads
  const int4* from = reinterpret_cast<const int4*>(params.items + n);
  int4* to = reinterpret_cast<int4*>(&item);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = from[i];
  return item;
}

// Keys of a slice that some of the rows see.
struct KeyRange {
  int begin, end;
};
__device__ inline KeyRange visible_keys_of_rows(const WorkSlice& s, int row, int rows) {
  const long long first = max(s.q_begin, row), last = min(s.q_end, row + rows) - 1;
  if (first > last) return {0, 0};
  return {within_int(max(static_cast<long long>(s.k_begin), first + s.lo)),
          within_int(min(static_cast<long long>(s.k_end), last + s.hi + 1))};
}
// The splits of `keys` keys that a tile's slices touch: the first one, and their number up to the last one.
struct SplitRange {
  int first, count;
};
__device__ inline SplitRange splits_of(const WorkSlice* slices, const ForwardItem& item, int keys) {
  int first = INT_MAX, last = -1;
  for (int n = item.first; n < item.last; ++n) {
    const WorkSlice s = n == item.first ? item.slice : slices[n];
    const KeyRange seen = visible_keys_of_rows(s, item.begin, item.end - item.begin);
    if (seen.begin >= seen.end) continue;
    first = min(first, (seen.begin - s.k_first) / keys);
    last = max(last, (seen.end - 1 - s.k_first) / keys);
  }
  return last < 0 ? SplitRange{0, 0} : SplitRange{first, last - first + 1};
}

// Iterates over the tiles of kKeys keys that rows [row, row + rows) see, slice by slice: all of them, or those of one
// split. Rows of the block past those are computed but never written. Each of kConsumers warpgroups has 64 rows times
// heads. heads_inverse is 65,536 / heads rounded up, which divides numbers up to 192 exactly by up to 16 heads.
template <int kKeys, int kConsumers, bool kSplits = false>
class KeyStepIterator {
 public:
  __device__ KeyStepIterator(const WorkSlice* slices, const ForwardItem& item, int heads_inverse, int from = 0,
                             int keys = 0)
      : slices_(slices),
        slice_(item.slice),
        row_(item.begin),
        rows_(item.end - item.begin),
        heads_inverse_(heads_inverse),
        member_(item.first),
        end_(item.last),
        from_(from),
        keys_(keys) {}
  __device__ bool start() { return member_ < end_ && enter(); }
  __device__ bool next() {
    base_ += kKeys;
    return base_ < stop_ || (next_slice() && enter());
  }
  __device__ int base() const { return base_; }
  __device__ Step step(int k_rows) const {
    constexpr int kFar = 0x3fff;
    const WorkSlice& s = slice_;
    const int last_key = base_ + kKeys - 1;
    const int last_row = row_ + rows_ - 1;
    const bool all = row_ >= s.q_begin && last_row < s.q_end && base_ >= s.k_begin && last_key < s.k_end &&
                     base_ - last_row >= s.lo && last_key - row_ <= s.hi;
    int flags = 0;
    for (int g = 0; g < (all ? 0 : kConsumers); ++g) flags |= flags_of(g) << g;
    // Past the buffer's last key TMA has filled in zeros.
    const bool zero_fill = base_ < s.k_begin || (last_key >= s.k_end && s.k_end < k_rows);
    const long long shift = static_cast<long long>(row_) - base_;
    return {flags | (zero_fill ? Step::kZeroFill : 0), Step::pair(max(0, s.q_begin - row_), min(rows_, s.q_end - row_)),
            Step::pair(max(0, s.k_begin - base_), min(kKeys, s.k_end - base_)),
            Step::pair(clamped(s.lo + shift, -kFar, kFar), clamped(s.hi + shift, -kFar, kFar))};
  }

 private:
  // Flags of a warpgroup's rows; rows past the tile's end do not count.
  __device__ int flags_of(int warpgroup) const {
    const WorkSlice& s = slice_;
    const int first = row_ + row_of(64 * warpgroup), last = min(row_ + row_of(64 * warpgroup + 63), row_ + rows_ - 1);
    const int first_key = max(base_, s.k_begin), last_key = min(base_ + kKeys, s.k_end) - 1;
    if (first <= last && first >= s.q_begin && last < s.q_end && last_key - first_key == kKeys - 1 &&
        first_key - last >= s.lo && last_key - first <= s.hi)
      return 0;
    const long long from = max(first, s.q_begin), to = min(last, s.q_end - 1);
    const bool sees = from <= to && first_key <= to + s.hi && last_key >= from + s.lo;
    const bool half = min(static_cast<long long>(last_key), to + s.hi) < base_ + kKeys / 2;
    return Step::kMasked | (!sees ? Step::kIdle : half ? Step::kHalf : 0);
  }
  __device__ int row_of(int place) const { return place * heads_inverse_ >> 16; }
  __device__ bool next_slice() {
    if (++member_ >= end_) return false;
    slice_ = slices_[member_];
    return true;
  }
  // Enters the current slice, or the next one of which the rows see something.
  __device__ bool enter() {
    do {
      const WorkSlice& s = slice_;
      KeyRange seen = visible_keys_of_rows(s, row_, rows_);
      if constexpr (kSplits) {
        const long long split = static_cast<long long>(s.k_first) + from_;
        seen.begin = within_int(max(static_cast<long long>(seen.begin), split));
        seen.end = within_int(min(static_cast<long long>(seen.end), split + keys_));
      }
      stop_ = seen.end;
      base_ = s.k_first + (seen.begin - s.k_first) / kKeys * kKeys;
      if (seen.begin < seen.end) return true;
    } while (next_slice());
    return false;
  }

  const WorkSlice* slices_;
  WorkSlice slice_;
  int row_, rows_, heads_inverse_, member_, end_, from_, keys_, base_, stop_;
};

}  // namespace weft::cuda::sm90
