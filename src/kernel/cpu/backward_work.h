// How a backward call is cut: into components that share neither query rows nor keys, and those that are large into
// parts that share keys but no rows. Nothing depends on the number of threads, so gradients have the same bits always.
#pragma once

#include <span>
#include <vector>

#include "weft/slice.h"

namespace weft::cpu {

// A slice's keys and where its gradients lie: sum row = key row + shift.
struct KeyPlace {
  Index slice = 0, shift = 0;
};

struct RowPart {
  std::vector<Range> blocks;  // of query rows
  Range sums;                 // rows of the sums that these touch; the part keeps no others
};

struct Component {
  std::vector<KeyPlace> slices;
  std::vector<Range> keys;  // touched, sorted, apart from each other; sums hold them one after another
  Index sum_rows = 0;       // rows of the sums
  std::vector<RowPart> parts;
  Index pairs = 0;
};

// Blocks of at most `block` query rows, for `groups` groups of heads. A part of one group is about a sixteenth of the
// whole call, or a component if that is less: more parts would share work among more threads, but each has its own
// sums.
std::vector<Component> components(std::span<const Slice> slices, Index block, Index groups);

}  // namespace weft::cpu
