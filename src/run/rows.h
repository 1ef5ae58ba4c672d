// Passes over rows between kernels: clear, add, round.
#pragma once

#include "run/workspace.h"
#include "weft/device.h"
#include "weft/tensor.h"

namespace weft::run {

void clear(const Place& place, const TensorView& view);  // zeros
void add(const Place& place, const TensorView& to,
         const ConstTensorView& from);  // f32 += f32, or f64 += f64, same shape
void round_to(const Place& place, const TensorView& to, const ConstTensorView& from);  // from f32 or f64, rounded once
// Rounds K and V, or skips the one that is summed in its output already.
void round_to(const Place& place, const Kv& to, const ConstKv& from);

}  // namespace weft::run
