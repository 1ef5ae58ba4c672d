// Slices joined where fewer of them show the same pairs, so that kernels meet longer ranges of keys.
#pragma once

#include <vector>

#include "weft/slice.h"

namespace weft {

// Joins slices of the same keys whose rows are adjacent: branches that see one prefix. Then it joins slices whose keys
// are adjacent: a node of a tree and its first child, which lie next to each other in the stream. The rows that see the
// first node and not the child keep a slice of their own, so that there are never more slices than before. Together
// they show the pairs that the given slices show, each once, and keep their order. The given slices share no pair.
std::vector<Slice> joined_slices(std::vector<Slice> slices);

}  // namespace weft
