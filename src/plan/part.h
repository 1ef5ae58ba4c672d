// How several threads share one sequence: each takes some of the runs.
#pragma once

#include "plan/runs.h"

namespace weft {

// A lookup whose kind of cut is known when the code is compiled: the other kinds fall away, and the rest is inlined.
template <RegularRuns::Cut kCut>
struct FixedRuns {
  RegularRuns runs;

  template <class F>
  WEFT_HD void for_each(Index sequence, Index a, Index b, Residues residues, F&& f) const {
    RegularRuns fixed = runs;
    fixed.cut = kCut;
    fixed.for_each(sequence, a, b, residues, f);
  }
};

// Runs [first, last) of those that a lookup names, in its order.
template <class Runs>
struct PartOf {
  Runs runs;
  Index first, last;

  template <class F>
  WEFT_HD void for_each(Index sequence, Index a, Index b, Residues residues, F&& f) const {
    Index n = 0;
    runs.for_each(sequence, a, b, residues, [&](const Run& run) {
      if (n >= first && n < last) f(run);
      ++n;
    });
  }
};

}  // namespace weft
