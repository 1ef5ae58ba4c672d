// Fewer things that stand for many, where all of them would not fit a page.
#pragma once

#include <vector>

#include "weft/layout.h"
#include "weft/slice.h"

namespace weft::draw {

// In the order of their first query, `each` neighbours as one that holds them all: no more than `most`.
struct BundledSlices {
  std::vector<Slice> slices;
  Index each = 1;
};
BundledSlices bundled(std::vector<Slice> slices, Index most);

// Documents as the page has them: `each` neighbours as one.
struct BundledStream {
  std::vector<Index> offsets, used;  // [n + 1], [n]
  Index each = 1;
};
BundledStream bundled(const Stream& stream, Index most);

// Who holds what: every run of every rank; or, if they are more than `most`, stretches of tokens, each by the rank that
// holds its middle. Rows are then not known.
struct Holding {
  struct Part {
    Index rank;
    Run run;
  };
  std::vector<Part> parts;
  Index stretch = 0;  // tokens of one; 0: all runs, as they are
};
Holding holding(const Layout& layout, Index most);

}  // namespace weft::draw
