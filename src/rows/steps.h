// Steps of all-gather and ring attention over dual_chunk layouts, one sequence at a time: host and device.
#pragma once

#include "plan/views.h"
#include "weft/device_rows.h"
#include "weft/rows.h"
#include "weft/slice.h"

namespace weft {

WEFT_HD constexpr Index clamp_to(Index x, Index low, Index high) { return min_of(max_of(x, low), high); }
WEFT_HD constexpr Range shifted(Range r, Index by) { return {r.begin + by, r.end + by}; }

// Rows of the two buffers; the band counts from the first row of each.
struct StepEntry {
  Range q, k;
  Index lo = -kUnlimited, hi = kUnlimited;

  // The last query sees none past this one.
  WEFT_HD Index keys() const { return q.size() == 0 ? 0 : max_of(0, min_of(k.size(), shift_bound(hi, q.size()))); }
};

// One rank's rows of one sequence, counted from its first row there: piece `rank`, then piece 2·ranks-1-rank. Valid
// rows come first: the second piece has some only if the first has nothing else.
struct SequenceFold {
  Index ranks, rank, piece;

  WEFT_HD Index first() const { return rank * piece; }  // positions where the pieces begin
  WEFT_HD Index second() const { return (2 * ranks - 1 - rank) * piece; }
  WEFT_HD Index position(Index row) const { return row < piece ? first() + row : second() + row - piece; }
  WEFT_HD Index rows_before(Index position) const {
    return clamp_to(position - first(), 0, piece) + clamp_to(position - second(), 0, piece);
  }
};

// A dual_chunk layout's rows, as steps need them.
struct FoldedStream {
  StreamView stream;
  Index begin;  // the first offset of all
  Index ranks;

  WEFT_HD SequenceFold fold(Index sequence, Index rank) const {
    return {ranks, rank, (stream.offsets[sequence + 1] - stream.offsets[sequence]) / (2 * ranks)};
  }
  WEFT_HD Index first_row(Index sequence) const { return (stream.offsets[sequence] - begin) / ranks; }
};

// A plain mask on one sequence, in positions: j - i lies in [lo, hi], and both in one chunk (0: no chunks).
struct SequenceBand {
  Index diag, lo, hi, chunk;

  WEFT_HD SequenceBand(const MaskView& mask, Index len_q, Index len_k)
      : diag(mask.bottom_right ? len_k - len_q : 0), lo(0), hi(0), chunk(mask.chunk) {
    const Index right = mask.causal ? 0 : mask.right;
    lo = mask.left < 0 ? -kUnlimited : diag - mask.left;
    hi = right < 0 ? kUnlimited : diag + right;
  }

  // The keys of query i's chunk, and the first query of another one. Queries whose chunk has no keys, because it lies
  // before the first key or past the last, are one part.
  struct Part {
    Range keys;
    Index q_end;
  };
  WEFT_HD Part part_at(Index i, Index len_k) const {
    if (chunk == 0) return {{0, len_k}, kUnlimited};
    const Index begin = floor_div(i + diag, chunk) * chunk;
    if (begin < 0) return {{0, 0}, -diag};
    if (begin >= len_k) return {{len_k, len_k}, kUnlimited};
    return {{begin, min_of(begin + chunk, len_k)}, begin + chunk - diag};
  }
};

// Queries of one of a rank's two pieces; keys are tokens.
struct GatherSteps {
  FoldedStream q;
  StreamView k;
  MaskView mask;
  Index rank, step;

  template <class F>
  WEFT_HD void for_each(Index i, F&& f) const {
    const SequenceFold fold = q.fold(i, rank);
    const Index len_k = k.used[i], begin = step == 0 ? fold.first() : fold.second();
    const Index end = clamp_to(q.stream.used[i], begin, begin + fold.piece);
    const Index to_row = q.first_row(i) + step * fold.piece - begin;
    const SequenceBand band(mask, q.stream.used[i], len_k);
    Index at = begin;
    do {
      const SequenceBand::Part part = band.part_at(at, len_k);
      const Index stop = min_of(part.q_end, end), by = at - part.keys.begin;
      f(StepEntry{shifted({at, stop}, to_row), shifted(part.keys, k.offsets[i]), shift_bound(band.lo, by),
                  shift_bound(band.hi, by)});
      at = stop;
    } while (at < end);
  }
};

// A rank's queries against another's keys; causal. A chunk's positions are neighbouring rows also where it reaches from
// a rank's first piece into its second: it holds all between them.
struct RingSteps {
  FoldedStream stream;
  Index chunk, rank;
  RingTile tile;

  template <class F>
  WEFT_HD void for_each(Index i, F&& f) const {
    const SequenceFold q = stream.fold(i, rank), k = stream.fold(i, tile.keys_rank);
    const Index used = stream.stream.used[i], piece = q.piece, base = stream.first_row(i);
    StepEntry whole{{0, q.rows_before(used)}, {0, k.rows_before(used)}};
    if (tile.kind == RingTile::diagonal) whole.hi = 0;
    if (tile.kind == RingTile::below) whole.k.end = min_of(whole.k.end, piece);
    if (tile.kind == RingTile::above) whole.q = {piece, max_of(whole.q.end, piece)};
    Index row = whole.q.begin;
    do {
      StepEntry e = whole;
      if (chunk > 0) {
        const Index begin = q.position(row) / chunk * chunk, end = begin + chunk;
        e.q = {row, min_of(whole.q.end, q.rows_before(end))};
        e.k = {clamp_to(k.rows_before(begin), whole.k.begin, whole.k.end),
               clamp_to(k.rows_before(end), whole.k.begin, whole.k.end)};
      }
      row = e.q.end;
      e.q = shifted(e.q, base);
      e.k = shifted(e.k, base);
      f(e);
    } while (row < whole.q.end);
  }
};

// Checks of the arguments of a step on a device.

// A step of either kind; a ring's has more rules.
void check_gather_args(const DeviceStepArgs& args);
void check_ring_args(const DeviceStepArgs& args);

}  // namespace weft
