#include "convert.h"

#include <string>

#include "text.h"
#include "weft/error.h"

namespace weft::python {
namespace {

[[noreturn]] void refuse(std::string_view name, nb::handle object, std::string_view wanted) {
  throw Error(text(name, ": ", nb::type_name(object.type()).c_str(), " ", nb::repr(object).c_str(), " given"),
              text("give ", wanted));
}

Index whole(nb::handle object, std::string_view name, std::string_view wanted) {
  Index value = 0;
  if (nb::try_cast<Index>(object, value)) return value;
  // numpy's and torch's own numbers
  if (nb::hasattr(object, "__index__")) {
    PyObject* number = PyNumber_Index(object.ptr());
    if (number != nullptr) {
      const nb::object held = nb::steal(number);
      if (nb::try_cast<Index>(held, value)) return value;
    }
    PyErr_Clear();
  }
  refuse(name, object, wanted);
}

template <class T>
void append(const nb::ndarray<nb::ro>& array, std::vector<Index>& out) {
  const T* data = static_cast<const T*>(array.data());
  for (std::size_t i = 0; i < array.shape(0); ++i)
    out.push_back(static_cast<Index>(data[static_cast<Index>(i) * array.stride(0)]));
}

// A one-dimensional array of whole numbers on the CPU.
bool from_array(nb::handle object, std::string_view name, std::vector<Index>& out) {
  nb::ndarray<nb::ro> array;
  if (!nb::try_cast<nb::ndarray<nb::ro>>(object, array)) {
    PyErr_Clear();  // what the object itself said of it
    return false;
  }
  const nb::dlpack::dtype d = array.dtype();
  const bool is_signed = d.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Int);
  if (array.ndim() != 1 || !is_signed || d.lanes != 1 || (d.bits != 32 && d.bits != 64))
    refuse(name, object, "a one-dimensional array of int32 or int64, or a list of whole numbers");
  if (array.device_type() != nb::device::cpu::value)
    throw Error(text(name, " lies on a device (DLPack type ", array.device_type(), ")"),
                "give it on the CPU: plans are made there");
  out.reserve(array.shape(0));
  d.bits == 32 ? append<std::int32_t>(array, out) : append<std::int64_t>(array, out);
  return true;
}

}  // namespace

std::vector<Index> indices(nb::handle object, std::string_view name) {
  constexpr std::string_view kWanted = "a list or a one-dimensional integer array";
  std::vector<Index> out;
  const bool list = PyList_Check(object.ptr()) || PyTuple_Check(object.ptr());
  if (!list && from_array(object, name, out)) return out;
  if (!list && !PySequence_Check(object.ptr())) refuse(name, object, kWanted);
  for (nb::handle item : nb::borrow<nb::iterable>(object)) out.push_back(whole(item, name, kWanted));
  return out;
}

std::optional<std::vector<Index>> optional_indices(nb::handle object, std::string_view name) {
  if (object.is_none()) return {};
  return indices(object, name);
}

Index whole_number(nb::handle object, std::string_view name, std::string_view wanted) {
  if (PyBool_Check(object.ptr())) refuse(name, object, wanted);
  return whole(object, name, wanted);
}

bool flag(nb::handle object, std::string_view name) {
  bool value = false;
  if (!nb::try_cast<bool>(object, value)) refuse(name, object, "True or False");
  return value;
}

std::vector<Slice> slices_from(nb::handle object) {
  constexpr std::string_view kWanted =
      "rows of (q_begin, q_end, k_begin, k_end, lo, hi): whole numbers, or None for no limit in lo and hi";
  std::vector<Slice> out;
  if (!nb::hasattr(object, "__iter__")) refuse("slices", object, kWanted);
  const nb::object rows = nb::hasattr(object, "tolist") ? object.attr("tolist")() : nb::borrow(object);
  for (nb::handle row : nb::borrow<nb::iterable>(rows)) {
    Index values[6] = {0, 0, 0, 0, -kUnlimited, kUnlimited};
    if (!PySequence_Check(row.ptr()) || nb::len(row) != 6) refuse("slices", row, kWanted);
    for (std::size_t i = 0; i < 6; ++i) {
      const nb::object item = row[i];
      if (i < 4 || !item.is_none()) values[i] = whole(item, "slices", kWanted);
    }
    out.push_back({values[0], values[1], values[2], values[3], values[4], values[5]});
  }
  return out;
}

nb::ndarray<nb::numpy, Index> slices_array(const std::vector<Slice>& slices) {
  std::vector<Index> flat;
  flat.reserve(slices.size() * 6);
  for (const Slice& s : slices) flat.insert(flat.end(), {s.q_begin, s.q_end, s.k_begin, s.k_end, s.lo, s.hi});
  return array_of(std::move(flat), {slices.size(), 6});
}

std::vector<std::vector<Run>> runs_from(nb::handle object) {
  constexpr std::string_view kWanted =
      "a list of runs for each rank: (row, token, count) or (row, token, count, stride)";
  std::vector<std::vector<Run>> out;
  if (!PySequence_Check(object.ptr())) refuse("runs", object, kWanted);
  for (nb::handle rank : nb::borrow<nb::iterable>(object)) {
    if (!PySequence_Check(rank.ptr())) refuse("runs", rank, kWanted);
    out.emplace_back();
    for (nb::handle run : nb::borrow<nb::iterable>(rank)) {
      const std::vector<Index> v = indices(run, "runs");
      if (v.size() != 3 && v.size() != 4) refuse("runs", run, kWanted);
      out.back().push_back({v[0], v[1], v[2], v.size() == 4 ? v[3] : 1});
    }
  }
  return out;
}

IndexArray array_of(std::vector<Index> values) {
  const std::size_t n = values.size();
  return array_of(std::move(values), {n});
}

}  // namespace weft::python
