// Which runs of a buffer touch a range of tokens: by arithmetic for the regular layouts, by search in a table for the
// rest. Both answer in time linear in the runs they name, plus a logarithm for the table.
#pragma once

#include "weft/layout.h"
#include "weft/slice.h"

namespace weft {

// Tokens [begin, begin + width) modulo the stride: the residues worth looking at. Matters only to strided runs.
struct Residues {
  Index begin = 0;
  Index width = kUnlimited;
};

// A layout given by arithmetic, and the ranks whose buffers are concatenated.
struct RegularRuns {
  enum Cut { pieces, folded, folded_per_sequence, strided };

  Cut cut;
  Index ranks;
  Index begin, end;      // the tokens dealt out
  Index rows;            // of one rank
  Index piece;           // tokens in a piece (pieces, folded)
  const Index* offsets;  // [n + 1] (folded_per_sequence)
  RunList::Members members;

  // Calls f(run) for each run touching [a, b) that may hold tokens of these residues; runs are whole, not cut to a, b.
  // `sequence` is the one that holds [a, b); only folded_per_sequence looks at it.
  template <class F>
  WEFT_HD void for_each(Index sequence, Index a, Index b, Residues residues, F&& f) const {
    Range all{0, kUnlimited};
    for_each(sequence, a, b, residues, all, f);
  }
  // The same for runs number part.begin to part.end alone; `part` is then moved past the runs that were counted.
  template <class F>
  WEFT_HD void for_each(Index sequence, Index a, Index b, Residues residues, Range& part, F&& f) const {
    switch (cut) {
      case pieces:
        for_each_piece(max_of(a, begin), min_of(b, end), part, f);
        break;
      case folded:
        for_each_folded(Fold{begin, end, piece, 0}, a, b, part, f);
        break;
      case folded_per_sequence: {
        const Index from = offsets[sequence], to = offsets[sequence + 1];
        for_each_folded(Fold{from, to, (to - from) / (2 * ranks), (from - begin) / ranks}, a, b, part, f);
        break;
      }
      case strided:
        if (a < b) for_each_strided(residues, part, f);
        break;
    }
  }

 private:
  struct Fold {
    Index begin, end, piece, row;
  };

  // Members m whose rank lies in [low, high].
  WEFT_HD Range members_between(Index low, Index high) const {
    return {max_of(0, ceil_div(low - members.first, members.step)),
            min_of(members.count, floor_div(high - members.first, members.step) + 1)};
  }

  // Which of `size` runs are in `part`, which is then moved past them.
  WEFT_HD static Range take(Range& part, Index size) {
    const Range taken{min_of(part.begin, size), min_of(part.end, size)};
    part = {part.begin - taken.begin, is_unlimited(part.end) ? part.end : part.end - taken.end};
    return taken;
  }

  template <class F>
  WEFT_HD void for_each_piece(Index a, Index b, Range& part, F&& f) const {
    if (a >= b) return;
    const Range m = members_between((a - begin) / piece, (b - 1 - begin) / piece), n = take(part, m.size());
    for (Index i = m.begin + n.begin; i < m.begin + n.end; ++i) {
      const Index token = begin + (members.first + i * members.step) * piece;
      f(Run{i * rows, token, min_of(piece, end - token), 1});
    }
  }

  // 2·ranks pieces, of which rank r holds r and 2·ranks-1-r in this order. The last rank's two are one run.
  template <class F>
  WEFT_HD void for_each_folded(const Fold& fold, Index a, Index b, Range& part, F&& f) const {
    a = max_of(a, fold.begin);
    b = min_of(b, fold.end);
    if (a >= b) return;
    const Index first = (a - fold.begin) / fold.piece, last = (b - 1 - fold.begin) / fold.piece;
    // First the members by their first pieces; then, from the last member to the first, by their second.
    const Range up = first <= ranks ? members_between(min_of(first, ranks - 1), min_of(last, ranks - 1)) : Range{};
    const Range down =
        last > ranks ? members_between(2 * ranks - 1 - last, 2 * ranks - 1 - max_of(first, ranks + 1)) : Range{};
    const Range n = take(part, up.size() + down.size());
    for (Index j = n.begin; j < n.end; ++j) {
      const bool second = j >= up.size();
      const Index i = second ? down.end - 1 - (j - up.size()) : up.begin + j, rank = members.first + i * members.step;
      const Index token = fold.begin + (second ? 2 * ranks - 1 - rank : rank) * fold.piece;
      const Index length = !second && rank == ranks - 1 ? 2 * fold.piece : fold.piece;
      f(Run{i * rows + fold.row + (second ? fold.piece : 0), token, min_of(length, fold.end - token), 1});
    }
  }

  template <class F>
  WEFT_HD void for_each_strided(Residues residues, Range& part, F&& f) const {
    if (residues.width >= ranks) {
      strided_between(0, ranks - 1, part, f);
      return;
    }
    const Index low = floor_mod(residues.begin - begin, ranks), high = low + residues.width - 1;
    strided_between(low, min_of(high, ranks - 1), part, f);
    if (high >= ranks) strided_between(0, high - ranks, part, f);
  }

  template <class F>
  WEFT_HD void strided_between(Index low, Index high, Range& part, F&& f) const {
    const Range m = members_between(low, min_of(high, end - begin - 1)), n = take(part, m.size());
    for (Index i = m.begin + n.begin; i < m.begin + n.end; ++i) {
      const Index rank = members.first + i * members.step;
      f(Run{i * rows, begin + rank, ceil_div(end - begin - rank, ranks), ranks});
    }
  }
};

// Runs sorted by (token mod stride, token), so that each residue class is a sorted list of disjoint runs.
struct TableRuns {
  const Run* runs;
  const Index* residues;     // [classes] sorted
  const Index* class_begin;  // [classes + 1]
  Index classes, stride;

  template <class F>
  WEFT_HD void for_each(Index, Index a, Index b, Residues wanted, F&& f) const {
    if (a >= b) return;
    if (wanted.width >= stride) {
      classes_between(0, stride - 1, a, b, f);
      return;
    }
    const Index low = floor_mod(wanted.begin, stride), high = low + wanted.width - 1;
    classes_between(low, min_of(high, stride - 1), a, b, f);
    if (high >= stride) classes_between(0, high - stride, a, b, f);
  }

 private:
  template <class F>
  WEFT_HD void classes_between(Index low, Index high, Index a, Index b, F&& f) const {
    Index c = 0;
    for (Index size = classes; size > 0;) {  // first class with residue >= low
      const Index half = size / 2;
      if (residues[c + half] < low) {
        c += half + 1;
        size -= half + 1;
      } else {
        size = half;
      }
    }
    for (; c < classes && residues[c] <= high; ++c) runs_between(class_begin[c], class_begin[c + 1], a, b, f);
  }

  template <class F>
  WEFT_HD void runs_between(Index first, Index last, Index a, Index b, F&& f) const {
    for (Index size = last - first; size > 0;) {  // first run whose last token is not before a
      const Index half = size / 2;
      const Run& r = runs[first + half];
      if (r.token + (r.count - 1) * r.stride < a) {
        first += half + 1;
        size -= half + 1;
      } else {
        size = half;
      }
    }
    for (; first < last && runs[first].token < b; ++first) f(runs[first]);
  }
};

// Subsets of the runs of a lookup, by which several device threads share one sequence.

// A lookup whose kind of cut is a template argument, so that the compiler drops the other kinds and inlines the rest.
template <RegularRuns::Cut kCut>
struct FixedRuns {
  RegularRuns runs;

  template <class F>
  WEFT_HD void for_each(Index sequence, Index a, Index b, Residues residues, Range& part, F&& f) const {
    RegularRuns fixed = runs;
    fixed.cut = kCut;
    fixed.for_each(sequence, a, b, residues, part, f);
  }
};

// A contiguous part of the runs that a sequence of lookups names. `part` counts runs across the lookups, so that
// subsets that follow each other name together what the whole would have named, in the same order.
template <class Runs>
struct RunSubset {
  Runs runs;
  mutable Range part;

  template <class F>
  WEFT_HD void for_each(Index sequence, Index a, Index b, Residues residues, F&& f) const {
    runs.for_each(sequence, a, b, residues, part, f);
  }
};

}  // namespace weft
