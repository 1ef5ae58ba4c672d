#include "tensor.h"

#include <algorithm>
#include <optional>
#include <string>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "convert.h"
#include "device/device.h"
#include "gil.h"
#include "index.h"
#include "module.h"
#include "rows/row_tensor.h"
#include "text.h"
#include "weft/error.h"

namespace weft::python {
namespace {

std::string shape_text(const std::vector<Index>& shape) {
  std::string all = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) all += text(i == 0 ? "" : ", ", shape[i]);
  return all + "]";
}

std::vector<Index> contiguous_strides(const std::vector<Index>& shape) {
  std::vector<Index> strides(shape.size());
  Index count = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = count;
    count *= shape[i];
  }
  return strides;
}

// Memory that a CPU or a GPU can read, by DLPack's numbers.
Place place_of_dlpack(std::string_view name, int type, int device) {
  constexpr int kPinned = 3, kManaged = 13;
  if (type == nb::device::cpu::value || type == kPinned) return {};
  if (type == nb::device::cuda::value || type == kManaged) return {DeviceKind::cuda, device};
  throw Error(text(name, " lies on device ", device, " of DLPack type ", type),
              "Weft has kernels for CPUs and for GPUs with CUDA: move it there first");
}

// Strides of an array without elements are arbitrary in numpy and others.
void set_shape(Array& array, std::vector<Index> shape, std::vector<Index> strides) {
  const bool none = std::find(shape.begin(), shape.end(), 0) != shape.end();
  array.strides = none ? contiguous_strides(shape) : std::move(strides);
  array.shape = std::move(shape);
}

// From any object that speaks DLPack or the buffer protocol.
Array from_object(nb::handle object, std::string_view name) {
  nb::ndarray<nb::ro> array;
  nb::object said;
  if (!import_array(object, array, said)) {
    std::string given = nb::type_name(object.type()).c_str();
    if (nb::hasattr(object, "dtype")) given += text(" of ", nb::repr(object.attr("dtype")).c_str());
    if (said.is_valid()) given += text(" (its __dlpack__ raised ", nb::type_name(said.type()).c_str(), ")");
    raise_from({text(name, ": an array of numbers was expected, not ", given),
                "give a numpy, torch, JAX or CuPy array, or anything else that has __dlpack__"},
               said);
  }
  Array out;
  out.place = place_of_dlpack(name, array.device_type(), array.device_id());
  out.data = const_cast<void*>(array.data());
  const nb::dlpack::dtype d = array.dtype();
  out.item_bytes = d.bits / 8 * d.lanes;
  const auto is = [&](nb::dlpack::dtype_code code, int bits) {
    return d.code == static_cast<std::uint8_t>(code) && d.bits == bits && d.lanes == 1;
  };
  if (is(nb::dlpack::dtype_code::Float, 64))
    out.dtype = DType::f64;
  else if (is(nb::dlpack::dtype_code::Float, 32))
    out.dtype = DType::f32;
  else if (is(nb::dlpack::dtype_code::Float, 16))
    out.dtype = DType::f16;
  else if (is(nb::dlpack::dtype_code::Bfloat, 16))
    out.dtype = DType::bf16;
  else
    out.floating = false;
  std::vector<Index> shape, strides;
  for (std::size_t i = 0; i < array.ndim(); ++i) {
    shape.push_back(static_cast<Index>(array.shape(i)));
    strides.push_back(array.stride(i));
  }
  set_shape(out, std::move(shape), std::move(strides));
  out.imported = std::move(array);
  return out;
}

void need_floating(const Array& array, std::string_view name) {
  if (!array.floating)
    throw Error(text(name, ": its elements of ", array.item_bytes, " bytes are no floats Weft knows"),
                "use f32, bf16, f16 or, on a CPU, f64");
}

void check_use(const Array& array, std::string_view name, Use use) {
  if (use == Use::write && !array.writable)
    throw Error(text(name, " is read-only"), "give an array that can be written");
}

void need_dimensions(const Array& array, std::string_view name, std::size_t thd, Format format, std::string_view what) {
  const std::size_t wanted = format == Format::thd ? thd : thd + 1;
  if (array.shape.size() == wanted) return;
  constexpr std::string_view kFormats[] = {"thd", "bshd", "sbhd"};
  throw Error(text(name, " has shape ", shape_text(array.shape), ", but format ", kFormats[static_cast<int>(format)],
                   " has ", wanted, " dimensions", what),
              "reshape it, or name its format: thd [t, h, d], bshd [b, s, h, d], sbhd [s, b, h, d]");
}

// Sets rows and their strides from the leading dimensions; returns how many there are.
template <class View>
std::size_t set_rows(View& view, const Array& array, Format format) {
  if (format == Format::thd) {
    view.rows = array.shape[0];
    view.row_stride = array.strides[0];
    return 1;
  }
  const std::size_t batch = format == Format::bshd ? 0 : 1, length = 1 - batch;
  view.rows = array.shape[0] * array.shape[1];
  view.inner = std::max<Index>(array.shape[length], 1);
  view.row_stride = array.strides[length];
  view.outer_stride = array.strides[batch];
  return 2;
}

// Rows and heads, with dim 1. `thd`: how many dimensions the tensor has in format thd.
TensorView heads_view(const Array& array, std::string_view name, std::size_t thd, Format format, Use use,
                      std::string_view what = "") {
  check_use(array, name, use);
  need_floating(array, name);
  need_dimensions(array, name, thd, format, what);
  TensorView out;
  out.data = array.data;
  out.dtype = array.dtype;
  const std::size_t head = set_rows(out, array, format);
  out.heads = array.shape[head];
  out.head_stride = array.strides[head];
  out.dim = 1;
  return out;
}

}  // namespace

Place place_of(std::initializer_list<Named> arrays, std::uintptr_t stream) {
  std::optional<Place> place;
  bool one = true;
  for (const Named& n : arrays) {
    if (n.array == nullptr) continue;
    one = one && (!place || *place == n.array->place);
    if (!place) place = n.array->place;
  }
  if (!one) {
    std::string all;
    for (const Named& n : arrays)
      if (n.array != nullptr) all += text(all.empty() ? "" : ", ", n.name, " on ", name(n.array->place));
    throw Error(text("the arrays of a call lie in different places: ", all), "bring all of them to one device");
  }
  Place out = place.value_or(Place{});
  if (out.kind != DeviceKind::cpu) out.stream = reinterpret_cast<void*>(stream);
  return out;
}

Place place_on(std::optional<int> device, std::uintptr_t stream) {
  if (!device) return {};
  return {DeviceKind::cuda, *device, reinterpret_cast<void*>(stream)};
}

TensorView view(const Array& array, std::string_view name, Format format, Use use) {
  TensorView out = heads_view(array, name, 3, format, use);
  out.dim = array.shape.back();
  if (out.dim > 1 && array.strides.back() != 1)
    throw Error(
        text(name, " has shape ", shape_text(array.shape), " and strides ", shape_text(array.strides),
             ": the elements of a head are not contiguous"),
        text("make its last dimension contiguous: ", name, " = ", name, ".contiguous() or numpy.ascontiguousarray"));
  return out;
}

TensorView per_head_view(const Array& array, std::string_view name, Use use) {
  check_use(array, name, use);
  need_floating(array, name);
  if (array.shape.size() != 1)
    throw Error(text(name, " has shape ", shape_text(array.shape)), "give one number a query head: [heads]");
  TensorView out = per_head(array.data, array.dtype, array.shape[0]);
  out.head_stride = array.strides[0];
  return out;
}

TensorView token_heads_view(const Array& array, std::string_view name, Format format, Use use) {
  return heads_view(array, name, 2, format, use, " less the head dim");
}

RowTensor rows_view(const Array& array, std::string_view name, Format format, Use use) {
  check_use(array, name, use);
  const std::size_t leading = format == Format::thd ? 1 : 2;
  if (array.shape.size() < leading)
    throw Error(text(name, " has shape ", shape_text(array.shape)),
                "its first dimension must be rows, or its first two batch and length");
  Index contiguous = 1;
  for (std::size_t i = array.shape.size(); i-- > leading;) {
    if (array.shape[i] > 1 && array.strides[i] != contiguous)
      throw Error(text(name, " has shape ", shape_text(array.shape), " and strides ", shape_text(array.strides),
                       ": the elements of a row are not contiguous"),
                  "make its rows contiguous first");
    contiguous *= array.shape[i];
  }
  RowTensor rows;
  rows.data = array.data;
  set_rows(rows, array, format);
  rows.row_bytes = contiguous * array.item_bytes;
  rows.row_stride *= array.item_bytes;
  rows.outer_stride *= array.item_bytes;
  if (rows.rows <= 1)
    rows.row_stride = 0;
  else if (rows.row_stride == 0 && rows.row_bytes > 0)
    throw Error(text(name, " has shape ", shape_text(array.shape), " and strides ", shape_text(array.strides),
                     ": all its rows are one"),
                "copy it first");
  return rows;
}

namespace {

// `count` rows from `first` on, `step` apart: a block, or more where they cross an outer dimension.
void append_rows(const RowTensor& t, Index first, Index count, Index step, std::vector<Block>& blocks) {
  const Index stride = t.row_stride == 0 ? t.row_bytes : t.row_stride;
  for (Index done = 0; done < count;) {
    const Index row = first + done * step;
    const Index fit = t.inner == 0 ? count : (t.inner - row % t.inner + step - 1) / step;
    const Index n = min_of(count - done, fit);
    blocks.push_back({row_of(t, row), n, 1, t.row_bytes, stride * step, t.row_bytes});
    done += n;
  }
}

}  // namespace

void copy_on_gpu(const Place& place, const RunList& runs, const RowTensor& tokens, const RowTensor& rows, Way way) {
  std::vector<Block> token_blocks, row_blocks;
  for (const Run& r : runs.runs()) {
    append_rows(tokens, r.token, r.count, r.stride, token_blocks);
    append_rows(rows, r.row, r.count, 1, row_blocks);
  }
  if (way == Way::to_rows)
    device::copy(place, token_blocks, row_blocks);
  else
    device::copy(place, row_blocks, token_blocks);
}

namespace {

void bind_array(nb::module_& m) {
  nb::enum_<DType>(m, "DType")
      .value("f64", DType::f64)
      .value("f32", DType::f32)
      .value("bf16", DType::bf16)
      .value("f16", DType::f16);
  nb::enum_<Format>(m, "Format").value("thd", Format::thd).value("bshd", Format::bshd).value("sbhd", Format::sbhd);

  nb::class_<Array>(m, "Array", "An array of any framework as Weft sees it: its memory, not a copy.")
      .def_ro("shape", &Array::shape)
      .def_ro("strides", &Array::strides)
      .def_ro("dtype", &Array::dtype)
      .def_prop_ro(
          "device",
          [](const Array& a) { return a.place.kind == DeviceKind::cpu ? std::nullopt : std::optional(a.place.device); },
          "The number of the GPU that it lies on; None: the CPU.")
      .def_prop_ro("address", [](const Array& a) { return reinterpret_cast<std::uintptr_t>(a.data); });
  m.def(
      "array",
      [](nb::handle object, bool writable, std::string_view name, std::optional<DType> dtype) {
        Array out = from_object(object, name);
        out.writable = writable;
        if (dtype) {
          out.dtype = *dtype;
          out.floating = true;
        }
        return out;
      },
      nb::arg("object").none(), nb::arg("writable"), nb::arg("name"), nb::arg("dtype").none() = nb::none(),
      "Any object that speaks DLPack or the buffer protocol.");
  // Python asks for the parts itself where that is faster than a capsule. Without strides: contiguous.
  m.def(
      "array_at",
      [](std::uintptr_t address, std::optional<DType> dtype, Index item_bytes, std::vector<Index> shape,
         std::optional<std::vector<Index>> strides, nb::object owner, std::optional<int> device) {
        Array out;
        out.place = place_on(device, 0);
        out.data = reinterpret_cast<void*>(address);
        out.dtype = dtype.value_or(DType::f32);
        out.floating = dtype.has_value();
        out.item_bytes = item_bytes;
        std::vector<Index> given = strides ? std::move(*strides) : contiguous_strides(shape);
        set_shape(out, std::move(shape), std::move(given));
        out.owner = std::move(owner);
        return out;
      },
      nb::arg("address"), nb::arg("dtype").none(), nb::arg("item_bytes"), nb::arg("shape"), nb::arg("strides").none(),
      nb::arg("owner"), nb::arg("device").none() = nb::none());
  // Memory of Weft's own, which any framework takes over by DLPack.
  m.def(
      "empty",
      [](const std::vector<Index>& shape, DType dtype, std::optional<int> device) {
        Index count = 1;
        std::vector<std::size_t> sizes;
        for (const Index n : shape) {
          count *= n;
          sizes.push_back(at(n));
        }
        const Index bytes = max_of(count, 1) * size_of(dtype);
        const auto end_on_cpu = [](void* p) noexcept { ::operator delete(p, std::align_val_t{64}); };
        void* data =
            device ? device::take(place_on(device, 0), bytes) : ::operator new(at(bytes), std::align_val_t{64});
        nb::capsule owner(data, device ? device::give_back : +end_on_cpu);
        const nb::dlpack::dtype d = with_type(dtype, [&]<class T>(std::type_identity<T>) {
          const auto code = std::is_same_v<T, bf16> ? nb::dlpack::dtype_code::Bfloat : nb::dlpack::dtype_code::Float;
          return nb::dlpack::dtype{static_cast<std::uint8_t>(code), 8 * sizeof(T), 1};
        });
        return nb::ndarray<nb::array_api>(data, sizes.size(), sizes.data(), owner, nullptr, d,
                                          device ? nb::device::cuda::value : nb::device::cpu::value,
                                          device.value_or(0));
      },
      nb::arg("shape"), nb::arg("dtype"), nb::arg("device").none() = nb::none());
}

void bind_device(nb::module_& m) {
#ifdef WEFT_WITH_CUDA
  m.attr("has_cuda") = true;
#else
  m.attr("has_cuda") = false;
#endif
  m.def("gpus", &device::count, "GPUs that this build can use.");
  m.def(
      "synchronize", [](int device, std::uintptr_t stream) { device::synchronize(place_on(device, stream)); },
      nb::arg("device"), nb::arg("stream"), nb::call_guard<ReleaseGil>(), "Waits for a stream of a GPU.");
}

}  // namespace

void bind_tensor(nb::module_& m) {
  bind_array(m);
  bind_device(m);
}

}  // namespace weft::python
