// The slice: a rectangle of query rows x key rows cut by a diagonal band. Every mask is a list of these.
#pragma once

#include "weft/config.h"

namespace weft {

// The bound of a band that has no limit. Bounds saturate here.
inline constexpr Index kUnlimited = Index{1} << 60;

// A rectangle of query rows and key rows, cut by a band: row q sees row k iff both lie in the rectangle and lo <= k - q
// <= hi.
struct Slice {
  Index q_begin = 0, q_end = 0;
  Index k_begin = 0, k_end = 0;
  Index lo = -kUnlimited, hi = kUnlimited;

  friend bool operator==(const Slice&, const Slice&) = default;
};

// A half-open range of rows or tokens.
struct Range {
  Index begin = 0, end = 0;

  WEFT_HD constexpr Index size() const { return end > begin ? end - begin : 0; }
  friend bool operator==(const Range&, const Range&) = default;
};

// The smaller and the larger of two, on the host and on the device.
WEFT_HD constexpr Index min_of(Index a, Index b) { return a < b ? a : b; }
WEFT_HD constexpr Index max_of(Index a, Index b) { return a < b ? b : a; }

// Division rounded toward minus and plus infinity; the divisor is positive. A divisor of 1, the usual stride, skips the
// division, which is slow on devices.
WEFT_HD constexpr Index floor_div(Index a, Index b) { return b == 1 ? a : a / b - (a % b < 0 ? 1 : 0); }
WEFT_HD constexpr Index ceil_div(Index a, Index b) { return b == 1 ? a : a / b + (a % b > 0 ? 1 : 0); }
WEFT_HD constexpr Index floor_mod(Index a, Index b) { return a - floor_div(a, b) * b; }

// Whether a bound is none, and a bound moved by a distance; none stays none.
WEFT_HD constexpr bool is_unlimited(Index bound) { return bound >= kUnlimited || bound <= -kUnlimited; }
WEFT_HD constexpr Index shift_bound(Index bound, Index by) { return is_unlimited(bound) ? bound : bound + by; }

// Whether the slice shows key row k to query row q.
WEFT_HD constexpr bool sees(const Slice& s, Index q, Index k) {
  return q >= s.q_begin && q < s.q_end && k >= s.k_begin && k < s.k_end && k - q >= s.lo && k - q <= s.hi;
}

// Cuts away rows that see nothing, and keys past the last one seen. k_begin moves only if asked: kernels tile from it,
// and a row's bits must not depend on the rank that computes it. If nothing is visible, the query range is empty.
WEFT_HD constexpr Slice trimmed(Slice s, bool trim_k_begin) {
  if (s.lo > s.hi || s.k_begin >= s.k_end) {
    s.q_end = s.q_begin;
    return s;
  }
  s.q_begin = max_of(s.q_begin, shift_bound(-s.hi, s.k_begin));
  s.q_end = min_of(s.q_end, shift_bound(-s.lo, s.k_end));
  if (s.q_begin >= s.q_end) {
    s.q_end = s.q_begin;
    return s;
  }
  s.k_end = min_of(s.k_end, shift_bound(s.hi, s.q_end));
  if (trim_k_begin) s.k_begin = max_of(s.k_begin, shift_bound(s.lo, s.q_begin));
  return s;
}

// The part of the slice whose query rows lie in `rows`; its range of rows may be empty.
WEFT_HD constexpr Slice within_rows(Slice s, Range rows) {
  s.q_begin = max_of(s.q_begin, rows.begin);
  s.q_end = min_of(s.q_end, rows.end);
  return s;
}

// The keys that at least one row of the slice sees, which are always one range.
WEFT_HD constexpr Range touched_keys(const Slice& s) {
  const Slice t = trimmed(s, true);
  return t.q_begin < t.q_end ? Range{t.k_begin, t.k_end} : Range{};
}

// The number of visible (query, key) pairs, in constant time.
WEFT_API Index visible_pairs(const Slice& s);

}  // namespace weft
