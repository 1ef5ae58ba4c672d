// Rows of tensors as f32 and back. S brings the conversions of 16-bit floats: widen(const T*, float*, n), narrow(...).
#pragma once

#include <cstring>

#include "index.h"
#include "kernel/cpu/micro.h"
#include "weft/tensor.h"

namespace weft::cpu {

WEFT_INLINE constexpr Index round_up(Index n, Index multiple) { return (n + multiple - 1) / multiple * multiple; }

// The elements of (row, head), then zeros up to `width`.
template <class S>
WEFT_INLINE void load_f32(const ConstTensorView& view, Index row, Index head, float* to, Index width) {
  with_type(view.dtype, [&]<class T>(std::type_identity<T>) {
    const T* from = view.at<T>(row, head);
    if constexpr (sizeof(T) == 2)
      S::widen(from, to, view.dim);
    else
      for (Index i = 0; i < view.dim; ++i) to[i] = static_cast<float>(from[i]);  // f64: of dout and out
  });
  for (Index i = view.dim; i < width; ++i) to[i] = 0;
}

template <class S>
void store_f32(const TensorView& view, Index row, Index head, const float* from) {
  with_type(view.dtype, [&]<class T>(std::type_identity<T>) {
    T* to = view.at<T>(row, head);
    if constexpr (sizeof(T) == 2)
      S::narrow(from, to, view.dim);
    else
      for (Index i = 0; i < view.dim; ++i) to[i] = static_cast<T>(from[i]);
  });
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

// Units: what the products multiply, 32 bits each. One f32, or (S::kPair == 2) two bf16 that are contracted together.
// Buffers of pairs are float* too, but their bits are only ever moved.

// Units of a row of `dim` numbers that a product contracts, four at a time.
template <class S>
WEFT_INLINE constexpr Index units_of(Index dim) {
  return round_up(dim, 4 * S::kPair) / S::kPair;
}

WEFT_INLINE void clear_units(float* to, Index units) { std::memset(to, 0, at(units) * sizeof(float)); }

// The elements of (row, head), then zeros up to `units`.
template <class S>
WEFT_INLINE void load_units(const ConstTensorView& view, Index row, Index head, float* to, Index units) {
  if constexpr (S::kPair == 1) {
    load_f32<S>(view, row, head, to, units);
  } else {
    const std::size_t bytes = at(view.dim) * sizeof(bf16);
    std::memcpy(to, view.at<bf16>(row, head), bytes);
    std::memset(reinterpret_cast<char*>(to) + bytes, 0, at(units) * sizeof(float) - bytes);
  }
}

// Rows as products read them that contract rows, some columns at a time: `rows` of them, of `units` each.
// Pairs: [row / 2][i] = {rows[row][i], rows[row + 1][i]}.
// kBlocked: a block of kWidth columns of all rows, then the next, the last of kLast if `units`, a multiple of kLast,
// ask for it. Where L1 has few ways, the same columns of rows that lie a power of two apart would evict each other.
// Otherwise they are rows as they came, and what put() is given must already lie there.
template <class S>
struct ColumnBlocks {
  static constexpr Index kWidth = S::kPvVectors * S::kLanes, kLast = S::kBlocked ? kWidth / 2 : kWidth;
  static constexpr bool kInPlace = S::kPair == 1 && !S::kBlocked;
  static_assert(!S::kBlocked || S::kPair == 1);
  Index rows, units;

  // Floats from a row to the next that is contracted, and where columns [column, column + kWidth) of a row begin.
  WEFT_INLINE Index stride(Index column) const {
    if constexpr (!S::kBlocked) return S::kPair * units;
    return column < units / kWidth * kWidth ? kWidth : kLast;
  }
  WEFT_INLINE Index at(Index row, Index column) const {
    if constexpr (!S::kBlocked) return row * units + column;
    return column / kWidth * kWidth * rows + row * stride(column) + column % kWidth;
  }
  WEFT_INLINE void put(const float* from, Index first, Index count, float* to) const {
    if constexpr (S::kPair == 2) {
      for (Index r = 0; r < count; r += 2)
        S::zip(from + r * units, from + (r + 1) * units, to + (first + r) * units, 2 * units);
    } else if constexpr (S::kBlocked) {
      for (Index r = 0; r < count; ++r)
        for (Index c = 0; c < units; c += S::kLanes) S::store(to + at(first + r, c), S::load(from + r * units + c));
    }
  }
};

// x[0..kPair) as one unit per lane, rounded if it is a pair.
template <class S>
WEFT_INLINE typename S::V join(const typename S::V* x) {
  if constexpr (S::kPair == 1)
    return x[0];
  else
    return S::join(x[0], x[1]);
}

}  // namespace weft::cpu
