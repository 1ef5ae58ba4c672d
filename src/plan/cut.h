// The planner: cuts global slices by query runs and key runs. Pure, host and device, one sequence at a time.
#pragma once

#include "plan/runs.h"
#include "plan/views.h"
#include "weft/slice.h"

namespace weft {

// The part of a run that holds tokens of [a, b).
WEFT_HD inline Run cut_run(const Run& run, Index a, Index b) {
  const Index first = max_of(0, ceil_div(a - run.token, run.stride));
  const Index last = min_of(run.count, ceil_div(b - run.token, run.stride));
  return {run.row + first, run.token + first * run.stride, max_of(0, last - first), run.stride};
}

// A global slice seen through one query run and one key run: inside a run token = stride·row + constant, so the band
// stays a band: lo <= stride·(k - q) + shift <= hi.
WEFT_HD inline Slice local_slice(const Slice& global, const Run& q, const Run& k, Index stride) {
  const Index shift = (k.token - stride * k.row) - (q.token - stride * q.row);
  return {q.row,
          q.row + q.count,
          k.row,
          k.row + k.count,
          is_unlimited(global.lo) ? global.lo : ceil_div(global.lo - shift, stride),
          is_unlimited(global.hi) ? global.hi : floor_div(global.hi - shift, stride)};
}

// One query run against all key runs of the slice.
template <class Keys, class F>
WEFT_HD void cut_query_run(const Slice& global, const Run& whole_q, Index sequence, const Keys& keys, Index stride,
                           bool keep_k_begin, F&& emit) {
  const Run q = cut_run(whole_q, global.q_begin, global.q_end);
  if (q.count == 0) return;
  // The keys that some query of the run may see; runs outside of them are skipped.
  const Index q_last = q.token + (q.count - 1) * q.stride;
  const Index k_end = min_of(global.k_end, shift_bound(global.hi, q_last + 1));
  const Index k_seen = max_of(global.k_begin, shift_bound(global.lo, q.token));
  const Index k_begin = keep_k_begin ? global.k_begin : k_seen;
  // Differences k - q mod stride: either the band is narrow, or the range of keys is, or every residue may occur.
  Residues residues{k_begin, max_of(0, k_end - k_begin)};
  if (!is_unlimited(global.lo) && !is_unlimited(global.hi) && global.hi - global.lo + 1 < residues.width)
    residues = {q.token + global.lo, global.hi - global.lo + 1};
  keys.for_each(sequence, k_begin, k_end, residues, [&](const Run& whole_k) {
    const Run k = cut_run(whole_k, k_begin, k_end);
    if (k.count == 0) return;
    const Slice s = trimmed(local_slice(global, q, k, stride), !keep_k_begin);
    if (s.q_begin < s.q_end) emit(s);
  });
}

// The local slices of each sequence: count(i) says how many, emit(i, out) writes them. Sequences are independent, so a
// device counts in parallel, computes prefix sums, and emits in parallel.
template <class Queries, class Keys>
struct SequencePlanner {
  StreamView q_stream, k_stream;
  MaskView mask;
  Queries q;
  Keys k;
  Index stride;
  bool keep_k_begin;

  WEFT_HD Index count(Index i) const {
    Index n = 0;
    for_each(i, [&](const Slice&) { ++n; });
    return n;
  }
  WEFT_HD void emit(Index i, Slice* out) const {
    for_each(i, [&](const Slice& s) { *out++ = s; });
  }

  template <class F>
  WEFT_HD void for_each(Index i, F&& f) const {
    const Range real = q_stream.real(i);
    const SequenceMask seen(mask, real, k_stream.real(i));
    q.for_each(i, real.begin, real.end, Residues{real.begin, real.size()}, [&](const Run& run) {
      const Range held{run.token, run.token + (run.count - 1) * run.stride + 1};
      seen.for_each(held, [&](const Slice& s) { cut_query_run(s, run, i, k, stride, keep_k_begin, f); });
    });
  }
};

}  // namespace weft
