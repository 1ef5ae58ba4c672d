// Views of tensors [rows, heads, dim]: thd, bshd, sbhd and interleaved qkv are one case, told apart by strides.
#pragma once

#include <span>
#include <string_view>
#include <type_traits>

#include "weft/dtype.h"

namespace weft {

// A tensor in memory of the caller. Element (row, head, i) lies row_offset(row) + head·head_stride + i elements after
// `data`. Strides count elements. The last dimension has no gaps; make other tensors contiguous first.
template <class Void>
struct BasicTensorView {
  Void* data = nullptr;
  DType dtype = DType::f32;
  Index rows = 0, heads = 0, dim = 0;
  Index row_stride = 0, head_stride = 0;
  Index inner = 0;  // rows per outer step; 0: no outer dimension
  Index outer_stride = 0;

  // An optional tensor that was left out has neither data nor rows.
  WEFT_HD constexpr bool given() const { return data != nullptr || rows != 0; }
  WEFT_HD constexpr Index row_offset(Index row) const {
    return inner == 0 ? row * row_stride : row / inner * outer_stride + row % inner * row_stride;
  }
  WEFT_HD constexpr Index offset(Index row, Index head) const { return row_offset(row) + head * head_stride; }
  // Where (row, head) begins; T must be the type that `dtype` names.
  template <class T>
  WEFT_HD auto* at(Index row, Index head) const {
    using Element = std::conditional_t<std::is_const_v<Void>, const T, T>;
    return static_cast<Element*>(data) + offset(row, head);
  }
  // Implicit, as T* becomes const T*.
  template <class Other>
    requires(std::is_same_v<Other, const void> && !std::is_const_v<Void>)
  operator BasicTensorView<Other>() const {  // NOLINT(google-explicit-constructor)
    return {data, dtype, rows, heads, dim, row_stride, head_stride, inner, outer_stride};
  }
};

// A tensor that is written, and one that is only read.
using TensorView = BasicTensorView<void>;
using ConstTensorView = BasicTensorView<const void>;

namespace detail {
template <class T>
using VoidOf = std::conditional_t<std::is_const_v<T>, const void, void>;

// Error if [first, first + count) leaves [0, size).
WEFT_API void check_part(std::string_view what, Index first, Index count, Index size);
// Error if the parts q, k and v of a fused tensor do not make up the whole.
WEFT_API void check_whole(std::string_view what, Index parts, Index size);

template <class Void>
Void* advanced(Void* data, DType dtype, Index elements) {
  using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
  return data == nullptr ? nullptr : static_cast<Byte*>(data) + elements * size_of(dtype);
}
}  // namespace detail

// Contiguous [tokens, heads, dim].
template <class T>
constexpr BasicTensorView<detail::VoidOf<T>> thd(T* data, DType dtype, Index tokens, Index heads, Index dim) {
  return {data, dtype, tokens, heads, dim, heads * dim, dim, 0, 0};
}

// Contiguous [batch, length, heads, dim]; row = token = sequence * length + position.
template <class T>
constexpr auto bshd(T* data, DType dtype, Index batch, Index length, Index heads, Index dim) {
  return thd(data, dtype, batch * length, heads, dim);
}

// Contiguous [length, batch, heads, dim]; row = token = sequence * length + position, as for bshd.
template <class T>
constexpr auto sbhd(T* data, DType dtype, Index batch, Index length, Index heads, Index dim) {
  auto view = thd(data, dtype, batch * length, heads, dim);
  view.row_stride = batch * heads * dim;
  view.inner = length;
  view.outer_stride = heads * dim;
  return view;
}

// Contiguous [tokens, heads], such as an LSE, and contiguous [heads], such as sinks or max_logit.
template <class T>
constexpr auto token_heads(T* data, DType dtype, Index tokens, Index heads) {
  return thd(data, dtype, tokens, heads, 1);
}
template <class T>
constexpr auto per_head(T* data, DType dtype, Index heads) {
  return thd(data, dtype, 1, heads, 1);
}

// Some heads, or some of the last dimension, of a view. Together they split any fused qkv tensor.
template <class Void>
BasicTensorView<Void> head_range(BasicTensorView<Void> view, Index first, Index count) {
  detail::check_part("heads", first, count, view.heads);
  view.data = detail::advanced(view.data, view.dtype, first * view.head_stride);
  view.heads = count;
  return view;
}
template <class Void>
BasicTensorView<Void> dim_range(BasicTensorView<Void> view, Index first, Index count) {
  detail::check_part("dim", first, count, view.dim);
  view.data = detail::advanced(view.data, view.dtype, first);
  view.dim = count;
  return view;
}

// Views of the q, k and v that one fused tensor holds.
template <class Void>
struct QkvViews {
  BasicTensorView<Void> q, k, v;
};

// Splits [.., 3, heads, dim], given as [.., 3·heads, dim] of any of the views above; heads_k < heads_q is fused
// grouped-query.
template <class Void>
QkvViews<Void> qkv_3hd(BasicTensorView<Void> qkv, Index heads_q, Index heads_k) {
  detail::check_whole("heads", heads_q + 2 * heads_k, qkv.heads);
  return {head_range(qkv, 0, heads_q), head_range(qkv, heads_q, heads_k), head_range(qkv, heads_q + heads_k, heads_k)};
}
// Splits [.., heads, 3, dim], given as [.., heads, 3·dim].
template <class Void>
QkvViews<Void> qkv_h3d(BasicTensorView<Void> qkv) {
  const Index dim = qkv.dim / 3;
  detail::check_whole("dim", 3 * dim, qkv.dim);
  return {dim_range(qkv, 0, dim), dim_range(qkv, dim, dim), dim_range(qkv, 2 * dim, dim)};
}

// What an entry point expects of a tensor. kAny: any size.
struct TensorSpec {
  static constexpr Index kAny = -1;
  std::string_view name = {};
  Index rows = kAny, heads = kAny, dim = kAny;
  std::span<const DType> dtypes = kDTypes;
  bool output = false;  // no two elements may share memory
};

// Error for a null or misaligned pointer, a dtype or shape other than asked for, no heads or no dim, more rows than
// kMaxTokens, negative strides and, in outputs, strides that make elements overlap. Reads no element.
WEFT_API void check_tensor(const ConstTensorView& view, const TensorSpec& spec);

}  // namespace weft
