// Tensor maps for TMA.
#pragma once

#include <cuda.h>

#include "weft/tensor.h"

namespace weft::cuda::sm90 {

// Boxes {64 columns, heads, rows} with the 128-byte swizzle, of a tensor that has rows and is aligned for TMA
// (aligned_copy.h).
CUtensorMap tensor_map(const ConstTensorView& view, int box_heads, int box_rows);

}  // namespace weft::cuda::sm90
