// Visible pairs of a slice in closed form.
#pragma once

#include "weft/layout.h"
#include "weft/slice.h"

namespace weft {

// Sum over j in [0, n) of x + j·step, clamped to [0, top] each.
WEFT_HD constexpr Index sum_of_clamped(Index x, Index step, Index n, Index top) {
  const Index first = min_of(n, max_of(0, ceil_div(-x, step)));          // from here x + j·step >= 0
  const Index full = min_of(n, max_of(first, ceil_div(top - x, step)));  // from here >= top
  const Index rising = full - first;
  return rising * (x + first * step) + step * (rising * (rising - 1) / 2) + (n - full) * top;
}

// Pairs of the slice whose query is a token of the run; the run's tokens must lie in [q_begin, q_end).
WEFT_HD constexpr Index visible_pairs(const Slice& s, const Run& q) {
  const Index keys = s.k_end - s.k_begin;
  if (q.count <= 0 || keys <= 0 || s.lo > s.hi) return 0;
  // Bounds far outside the rectangle change nothing; brought near, sums stay small.
  const Index last = q.token + (q.count - 1) * q.stride;
  const Index hi = min_of(s.hi, s.k_end - q.token), lo = max_of(s.lo, s.k_begin - last);
  const Index below = q.token - s.k_begin;
  return sum_of_clamped(below + max_of(hi, s.k_begin - last - 1) + 1, q.stride, q.count, keys) -
         sum_of_clamped(below + min_of(lo, s.k_end - q.token + 1), q.stride, q.count, keys);
}

}  // namespace weft
