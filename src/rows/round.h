// Rounding of f32 rows in the memory of a GPU.
#pragma once

#include "weft/device.h"
#include "weft/tensor.h"

namespace weft {

struct Rounding {
  ConstTensorView from;  // f32
  TensorView to;         // of the same shape; f64, f32, bf16 or f16
};
// One or two tensors, if they have one dtype in one launch; in the place's stream.
void round_on_device(const Place& place, const Rounding& first, const Rounding* second = nullptr);

}  // namespace weft
