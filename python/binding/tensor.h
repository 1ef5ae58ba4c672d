// Arrays of any framework, seen as Weft sees tensors: no element is copied.
#pragma once

#include <string_view>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "weft/layout.h"
#include "weft/tensor.h"

namespace weft::python {

namespace nb = nanobind;

enum class Format { thd, bshd, sbhd };

// An array: where it lies and what shape it has. `owner` or `imported` keeps the memory alive.
struct Array {
  void* data = nullptr;
  DType dtype = DType::f32;
  bool floating = true;  // `dtype` says what it holds; if not, only its bytes can be moved
  Index item_bytes = 0;
  std::vector<Index> shape, strides;  // in elements
  bool writable = true;
  nb::object owner;
  nb::ndarray<nb::ro> imported;
};

// thd [t, h, d]; bshd [b, s, h, d] and sbhd [s, b, h, d] as rows b·s. Error, by the tensor's name, for another number
// of dimensions or a last dimension that is not contiguous.
ConstTensorView view(const Array& array, std::string_view name, Format format);
// The same for what is written.
TensorView output(const Array& array, std::string_view name, Format format);
// A vector [h] as a tensor of one row.
ConstTensorView per_head_view(const Array& array, std::string_view name);
TensorView per_head_output(const Array& array, std::string_view name);
// [t, h], or [b, s, h] and [s, b, h]: an LSE.
ConstTensorView token_heads_view(const Array& array, std::string_view name, Format format);
TensorView token_heads_output(const Array& array, std::string_view name, Format format);
// Rows of anything: [t, ...], [b, s, ...] or [s, b, ...]; what is behind must lie side by side.
RowTensor rows_view(const Array& array, std::string_view name, Format format, bool written);

}  // namespace weft::python
