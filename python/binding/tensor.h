// Arrays of any framework, seen as Weft sees tensors: no element is copied.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "weft/device.h"
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
  Place place = {};  // without a stream, which belongs to a call
  nb::object owner;
  nb::ndarray<nb::ro> imported;
};

// An array of a call by its name; null: left out.
struct Named {
  Named(std::string_view n, const Array& a) : name(n), array(&a) {}
  Named(std::string_view n, const std::optional<Array>& a) : name(n), array(a ? &*a : nullptr) {}
  std::string_view name;
  const Array* array;
};
// Where all of them lie, with the stream that work on them is put into. Error, naming each, if that is not one place.
Place place_of(std::initializer_list<Named> arrays, std::uintptr_t stream);
// GPU `device`, or the CPU if there is none.
Place place_on(std::optional<int> device, std::uintptr_t stream);

// Views of arrays, which errors call by name: of another number of dimensions, not contiguous where they must be, or
// read-only and to be written.
enum class Use { read, write };
// thd [t, h, d]; bshd [b, s, h, d] and sbhd [s, b, h, d] as rows b·s. The last dimension must be contiguous.
TensorView view(const Array& array, std::string_view name, Format format, Use use = Use::read);
// A vector [h] as a tensor of one row.
TensorView per_head_view(const Array& array, std::string_view name, Use use = Use::read);
// [t, h], or [b, s, h] and [s, b, h]: an LSE.
TensorView token_heads_view(const Array& array, std::string_view name, Format format, Use use = Use::read);
// Rows of anything: [t, ...], [b, s, ...] or [s, b, ...]; the dimensions after those must be contiguous.
RowTensor rows_view(const Array& array, std::string_view name, Format format, Use use);

// Copies on a GPU between tensors in token order and in row order. Rows that hold no token are left as they are.
enum class Way { to_rows, to_tokens };
void copy_on_gpu(const Place& place, const RunList& runs, const RowTensor& tokens, const RowTensor& rows, Way way);

}  // namespace weft::python
