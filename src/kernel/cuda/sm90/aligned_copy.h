// Bulk tensor copies want rows that lie evenly, and rows and heads at multiples of 16 bytes. Tensors that do not are
// copied to where they do. Outputs are written in two ways alone.
#pragma once

#include <cstdint>

#include "cuda/stream_array.h"
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

// An output of which a kernel writes eight elements at once, or floats: if it is neither, floats aside, which `finish`
// brings there.
class AlignedOutput {
 public:
  AlignedOutput(const TensorView& view, DType inputs, cudaStream_t stream);
  const TensorView& view() const { return view_; }
  const TensorView& asked() const { return asked_; }
  bool wide() const { return wide_; }  // of the inputs' dtype
  void finish() const;

 private:
  bool wide_ = false;
  StreamArray<float> aside_;
  TensorView asked_, view_;
  cudaStream_t stream_;
};

}  // namespace weft::cuda::sm90
