// How several threads share one sequence: each takes some of the runs.
#pragma once

#include "plan/runs.h"

namespace weft {

// A lookup whose kind of cut is known when the code is compiled: the other kinds fall away, and the rest is inlined.
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

// Some of the runs that a lookup names, counted on from one question to the next, so that the parts one after another
// name all that one would have named.
template <class Runs>
struct PartOf {
  Runs runs;
  mutable Range part;

  template <class F>
  WEFT_HD void for_each(Index sequence, Index a, Index b, Residues residues, F&& f) const {
    runs.for_each(sequence, a, b, residues, part, f);
  }
};

}  // namespace weft
