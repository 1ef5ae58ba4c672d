// TMA needs one stride between rows, and rows and heads at multiples of 16 bytes: other inputs are copied. Kernels
// write outputs either eight elements at a time or as f32: other outputs are written to an f32 buffer first.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "cuda/handle_pool.h"
#include "weft/tensor.h"

namespace weft::cuda::sm90 {

class AlignedInput {
 public:
  AlignedInput(const ConstTensorView& view, cudaStream_t stream);
  const ConstTensorView& view() const { return view_; }

 private:
  StreamArray<std::uint16_t> copy_;
  ConstTensorView view_;
};

// Can 8 elements of this dtype be stored at once?
bool stores_vec8(const TensorView& view, DType dtype);

// An output in a form that kernels can write; `finish` rounds the f32 buffer into it, if there is one.
class AlignedOutput {
 public:
  AlignedOutput(const TensorView& view, DType inputs, cudaStream_t stream);
  const TensorView& view() const { return view_; }
  const TensorView& asked() const { return asked_; }
  bool vec8() const { return vec8_; }  // it has the inputs' dtype
  void finish() const;

 private:
  bool vec8_;
  StreamArray<float> aside_;
  TensorView asked_, view_;
  cudaStream_t stream_;
};

// Boxes {64 columns, heads, rows} with the 128-byte swizzle, of a tensor that has rows and is aligned for TMA
// (aligned_copy.h).
CUtensorMap tensor_map(const ConstTensorView& view, int box_heads, int box_rows);

}  // namespace weft::cuda::sm90
