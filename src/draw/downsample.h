// Fewer items that stand for many, where all of them do not fit a page.
#pragma once

#include <vector>

#include "weft/layout.h"
#include "weft/slice.h"

namespace weft::draw {

// At most `most` slices: sorted by their first query, every `each` neighbours are merged into one that covers them all.
struct BundledSlices {
  std::vector<Slice> slices;
  Index each = 1;
};
BundledSlices bundled(std::vector<Slice> slices, Index most);

// At most `most` documents: every `each` neighbours are merged into one.
struct BundledStream {
  std::vector<Index> offsets, used;  // [n + 1], [n]
  Index each = 1;
};
BundledStream bundled(const Stream& stream, Index most);

// Every run of every rank; or, if there are more than `most`, stretches of equally many tokens, each assigned to the
// rank that holds its middle token. Rows are then unknown.
struct Holding {
  struct Part {
    Index rank;
    Run run;
  };
  std::vector<Part> parts;
  Index stretch = 0;  // tokens of a stretch; 0: the runs are exact
};
Holding holding(const Layout& layout, Index most);

}  // namespace weft::draw
