// Rows of tensors as f32 and back. S brings the conversions of 16-bit floats: widen(const T*, float*, n), narrow(...).
#pragma once

#include <cstring>

#include "kernel/cpu/micro.h"
#include "weft/tensor.h"

namespace weft::cpu {

WEFT_INLINE constexpr Index round_up(Index n, Index multiple) { return (n + multiple - 1) / multiple * multiple; }

// The elements of (row, head), then zeros up to `width`.
template <class S>
WEFT_INLINE void load_f32(const ConstTensorView& view, Index row, Index head, float* to, Index width) {
  switch (view.dtype) {
    case DType::f32:
      std::memcpy(to, view.at<float>(row, head), static_cast<std::size_t>(view.dim) * sizeof(float));
      break;
    case DType::bf16:
      S::widen(view.at<bf16>(row, head), to, view.dim);
      break;
    case DType::f16:
      S::widen(view.at<f16>(row, head), to, view.dim);
      break;
    case DType::f64:  // of dout and out
      for (Index i = 0; i < view.dim; ++i) to[i] = static_cast<float>(view.at<double>(row, head)[i]);
      break;
    case DType::f8_e4m3:
    case DType::f8_e5m2:
      break;  // check_tensor has refused them
  }
  for (Index i = view.dim; i < width; ++i) to[i] = 0;
}

template <class S>
void store_f32(const TensorView& view, Index row, Index head, const float* from) {
  switch (view.dtype) {
    case DType::f32:
      std::memcpy(view.at<float>(row, head), from, static_cast<std::size_t>(view.dim) * sizeof(float));
      break;
    case DType::bf16:
      S::narrow(from, view.at<bf16>(row, head), view.dim);
      break;
    case DType::f16:
      S::narrow(from, view.at<f16>(row, head), view.dim);
      break;
    case DType::f64:
      for (Index i = 0; i < view.dim; ++i) view.at<double>(row, head)[i] = static_cast<double>(from[i]);
      break;
    case DType::f8_e4m3:
    case DType::f8_e5m2:
      break;  // check_tensor has refused them
  }
}

WEFT_INLINE void clear_row(const TensorView& view, Index row, Index head) {
  std::memset(view.at<char>(0, 0) + view.offset(row, head) * size_of(view.dtype), 0,
              static_cast<std::size_t>(view.dim * size_of(view.dtype)));
}

// Prefetches rows that will be loaded next: rows of one head lie pages apart, which hardware prefetchers do not follow.
WEFT_INLINE void prefetch_rows(const ConstTensorView& view, Index begin, Index end, Index head) {
  const Index bytes = view.dim * size_of(view.dtype);
  for (Index row = begin; row < end; ++row) {
    const char* at = view.at<char>(0, 0) + view.offset(row, head) * size_of(view.dtype);
    for (Index i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);  // to L2: in L1 such rows evict each other
  }
}

// One number of a statistics tensor (f32 or f64).
WEFT_INLINE void store_number(const TensorView& view, Index row, Index head, float value) {
  if (view.dtype == DType::f32)
    *view.at<float>(row, head) = value;
  else
    *view.at<double>(row, head) = static_cast<double>(value);
}
WEFT_INLINE float load_number(const ConstTensorView& view, Index row, Index head) {
  return view.dtype == DType::f32 ? *view.at<float>(row, head) : static_cast<float>(*view.at<double>(row, head));
}

}  // namespace weft::cpu
