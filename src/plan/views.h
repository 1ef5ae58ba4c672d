// Packing and mask as plain pointers and numbers, so that the planner runs on the host and on a device.
#pragma once

#include "weft/mask.h"
#include "weft/packing.h"
#include "weft/slice.h"

namespace weft {

struct StreamView {
  const Index* offsets;  // [n + 1]
  const Index* used;     // [n]

  WEFT_HD Range real(Index i) const { return {offsets[i], offsets[i] + used[i]}; }
};

struct MaskView {
  bool causal, bottom_right;
  Index left, right;  // -1: unlimited
  Index chunk;        // 0: not chunked
};

inline StreamView view(const Stream& s) { return {s.offsets().data(), s.used_lengths().data()}; }
// No window or chunk needs to be longer than the longest stream; capped, sums with them cannot overflow.
inline MaskView view(const Mask& m) {
  return {m.causal, m.align == Align::bottom_right, min_of(m.left, kMaxTokens), min_of(m.right, kMaxTokens),
          min_of(m.chunk.value_or(0), kMaxTokens)};
}

// The part of one sequence's mask that concerns queries [q_begin, q_end): a list of global slices, one per chunk or
// one in all. Slices come in token order; each covers the queries of its chunk whole, cut only at q_begin and q_end.
class SequenceMask {
 public:
  WEFT_HD SequenceMask(const MaskView& mask, Range q, Range k) : q_(q), k_(k), chunk_(mask.chunk) {
    const Index diag = mask.bottom_right ? k.size() - q.size() : 0;
    // token difference k - q of the pair (i, j) is j - i + (k.begin - q.begin)
    origin_ = k.begin - q.begin + diag;
    const Index right = mask.causal ? 0 : mask.right;
    lo_ = mask.left < 0 ? -kUnlimited : origin_ - mask.left;
    hi_ = right < 0 ? kUnlimited : origin_ + right;
  }

  template <class F>
  WEFT_HD void for_each(Range q, F&& f) const {
    const Index q_begin = max_of(q.begin, q_.begin), q_end = min_of(q.end, q_.end);
    if (q_begin >= q_end || k_.size() == 0 || lo_ > hi_) return;
    if (chunk_ == 0) {
      f(Slice{q_begin, q_end, k_.begin, k_.end, lo_, hi_});
      return;
    }
    // Query token t looks at chunk floor((t + origin - k.begin) / chunk), if that chunk has keys.
    const Index to_key = origin_ - k_.begin;
    const Index first = max_of(0, floor_div(q_begin + to_key, chunk_));
    const Index last = min_of(floor_div(q_end - 1 + to_key, chunk_), floor_div(k_.size() - 1, chunk_));
    for (Index c = first; c <= last; ++c) {
      const Index begin = c * chunk_, end = begin + chunk_;
      f(Slice{max_of(q_begin, begin - to_key), min_of(q_end, end - to_key), k_.begin + begin,
              min_of(k_.end, k_.begin + end), lo_, hi_});
    }
  }

 private:
  Range q_, k_;
  Index chunk_, origin_ = 0, lo_ = 0, hi_ = 0;
};

}  // namespace weft
