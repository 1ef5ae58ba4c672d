// A user's own slices: refused if one leaves its stream, covers padding, or shares a pair with another.
#pragma once

#include <vector>

#include "weft/packing.h"
#include "weft/slice.h"

namespace weft {

// Returns the slices with bounds beyond the longest stream set to unlimited, or to just out of reach.
std::vector<Slice> checked_slices(std::vector<Slice> slices, const Packing& packing);

}  // namespace weft
