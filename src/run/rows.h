// Passes over rows that are no kernel's: clear, add, round. Few, because each touches memory once more.
#pragma once

#include "run/workspace.h"
#include "weft/device.h"
#include "weft/tensor.h"

namespace weft::run {

void clear(const Place& place, const TensorView& view);  // zeros
void add(const Place& place, const TensorView& to,
         const ConstTensorView& from);  // f32 += f32, or f64 += f64, same shape
void round_to(const Place& place, const TensorView& to, const ConstTensorView& from);  // from f32 or f64, rounded once
void round_to(const Place& place, const Kv& to, const ConstKv& from);                  // .. what is not there already

}  // namespace weft::run
