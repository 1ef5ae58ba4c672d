// Passes over rows that are no kernel's: clear, add, round. Few, because each touches memory once more.
#pragma once

#include "weft/tensor.h"

namespace weft::run {

void clear(const TensorView& view);                                // zeros
void add(const TensorView& to, const ConstTensorView& from);       // f32 += f32, same shape
void round_to(const TensorView& to, const ConstTensorView& from);  // from f32, rounded once

}  // namespace weft::run
