// Subsets of the runs of a lookup, by which several device threads share one sequence.
#pragma once

#include "plan/runs.h"

namespace weft {

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
