// A user's own slices: refused if one leaves its stream, covers padding, or shares a pair with another.
#pragma once

#include <vector>

#include "weft/packing.h"
#include "weft/slice.h"

namespace weft {

// The same slices with bounds beyond any stream brought in: "no limit", or just out of reach.
std::vector<Slice> checked_slices(std::vector<Slice> slices, const Packing& packing);

}  // namespace weft
