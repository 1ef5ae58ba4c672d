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
  if (nb::try_cast<Index>(object, value, false)) return value;
  // numpy's and torch's own numbers
  if (nb::hasattr(object, "__index__")) {
    const nb::object number = nb::steal(PyNumber_Index(object.ptr()));
    if (!number.is_valid()) caught_exception();
    if (number.is_valid() && nb::try_cast<Index>(number, value, false)) return value;
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
  nb::object said;
  if (!import_array(object, array, said)) return false;
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

// The length of a sequence. Iterators without an end are refused before they are read, and so are sequences far too
// long to be meant (a range takes no memory until it is read).
Py_ssize_t length_of(nb::handle object, std::string_view name, std::string_view wanted) {
  constexpr Py_ssize_t kMost = 1 << 26;
  const bool sized = PySequence_Check(object.ptr()) && nb::hasattr(object, "__len__");
  if (!sized) refuse(name, object, wanted);
  const Py_ssize_t n = PySequence_Size(object.ptr());
  if (n < 0) throw nb::python_error();
  if (n > kMost)
    throw Error(text(name, ": ", nb::type_name(object.type()).c_str(), " of ", n, " entries given"),
                text("give at most ", kMost, ", or an array"));
  return n;
}

nb::object item_of(nb::handle sequence, Py_ssize_t i) {
  PyObject* item = PySequence_GetItem(sequence.ptr(), i);
  if (item == nullptr) throw nb::python_error();
  return nb::steal(item);
}

// torch keeps negation as a flag outside the memory, and DLPack does not pass it on.
nb::object with_flags_resolved(nb::handle object) {
  if (!nb::hasattr(object, "resolve_neg")) return nb::borrow(object);
  return object.attr("resolve_neg")();
}

nb::object call_dlpack(nb::handle object) {
  const nb::object method = nb::steal(PyObject_GetAttrString(object.ptr(), "__dlpack__"));
  if (!method.is_valid()) return {};
  nb::object capsule = nb::steal(PyObject_CallObject(method.ptr(), nullptr));
  // Read-only memory is exported by newer versions of the protocol only.
  if (capsule.is_valid() || !(PyErr_ExceptionMatches(PyExc_BufferError) || PyErr_ExceptionMatches(PyExc_TypeError)))
    return capsule;
  PyErr_Clear();
  const nb::tuple nothing;
  nb::dict options;
  options["max_version"] = nb::make_tuple(1, 0);
  return nb::steal(PyObject_Call(method.ptr(), nothing.ptr(), options.ptr()));
}

}  // namespace

nb::object caught_exception() {
  nb::python_error e;
  if (!e.matches(PyExc_Exception)) throw e;
  return nb::borrow(e.value());
}

bool import_array(nb::handle object, nb::ndarray<nb::ro>& array, nb::object& said) {
  if (!nb::hasattr(object.type(), "__dlpack__")) return nb::try_cast<nb::ndarray<nb::ro>>(object, array);
  const nb::object capsule = call_dlpack(object);
  if (capsule.is_valid()) return nb::try_cast<nb::ndarray<nb::ro>>(capsule, array);
  said = caught_exception();
  const nb::object buffer = nb::steal(PyMemoryView_FromObject(object.ptr()));
  if (buffer.is_valid()) return nb::try_cast<nb::ndarray<nb::ro>>(buffer, array);
  caught_exception();
  return false;
}

std::vector<Index> indices(nb::handle object, std::string_view name) {
  constexpr std::string_view kWanted = "a list or a one-dimensional integer array";
  std::vector<Index> out;
  const bool list = PyList_Check(object.ptr()) || PyTuple_Check(object.ptr());
  if (!list && from_array(with_flags_resolved(object), name, out)) return out;
  const Py_ssize_t n = length_of(object, name, kWanted);
  for (Py_ssize_t i = 0; i < n; ++i) out.push_back(whole(item_of(object, i), name, kWanted));
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
  const nb::object own = nb::hasattr(object, "item") ? object.attr("item")() : nb::borrow(object);  // numpy's and torch's
  if (!nb::try_cast<bool>(own, value)) refuse(name, object, "True or False");
  return value;
}

std::vector<Slice> slices_from(nb::handle object) {
  constexpr std::string_view kWanted =
      "rows of (q_begin, q_end, k_begin, k_end, lo, hi): whole numbers, or None for no limit in lo and hi";
  std::vector<Slice> out;
  const nb::object rows = nb::hasattr(object, "tolist") ? object.attr("tolist")() : nb::borrow(object);
  const Py_ssize_t n = length_of(rows, "slices", kWanted);
  for (Py_ssize_t r = 0; r < n; ++r) {
    const nb::object row = item_of(rows, r);
    Index values[6] = {0, 0, 0, 0, -kUnlimited, kUnlimited};
    if (length_of(row, "slices", kWanted) != 6) refuse("slices", row, kWanted);
    for (std::size_t i = 0; i < 6; ++i) {
      const nb::object item = item_of(row, static_cast<Py_ssize_t>(i));
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
  return array_of(std::move(flat), 6);
}

std::vector<std::vector<Run>> runs_from(nb::handle object) {
  constexpr std::string_view kWanted =
      "a list of runs for each rank: (row, token, count) or (row, token, count, stride)";
  std::vector<std::vector<Run>> out;
  const Py_ssize_t ranks = length_of(object, "runs", kWanted);
  for (Py_ssize_t r = 0; r < ranks; ++r) {
    const nb::object rank = item_of(object, r);
    const Py_ssize_t n = length_of(rank, "runs", kWanted);
    out.emplace_back();
    for (Py_ssize_t i = 0; i < n; ++i) {
      const nb::object run = item_of(rank, i);
      const std::vector<Index> v = indices(run, "runs");
      if (v.size() != 3 && v.size() != 4) refuse("runs", run, kWanted);
      out.back().push_back({v[0], v[1], v[2], v.size() == 4 ? v[3] : 1});
    }
  }
  return out;
}

}  // namespace weft::python
