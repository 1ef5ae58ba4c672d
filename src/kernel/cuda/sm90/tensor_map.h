// Descriptions of tensors for bulk tensor copies.
#pragma once

#include <cuda.h>

#include "weft/tensor.h"

namespace weft::cuda::sm90 {

// Boxes {64 columns, heads, rows} of a tensor that has rows and lies evenly (even.h).
CUtensorMap tensor_map(const ConstTensorView& view, int box_heads, int box_rows);

}  // namespace weft::cuda::sm90
