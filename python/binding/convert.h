// Lists of numbers between Python and Weft.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "weft/layout.h"
#include "weft/slice.h"

namespace weft::python {

namespace nb = nanobind;

// For properties that return a new array: nanobind's default would tie its lifetime to the object.
inline constexpr auto kNew = nb::rv_policy::move;

// Clears the error that is set and returns it. Only an Exception is caught so: others, such as KeyboardInterrupt, are
// thrown on.
nb::object caught_exception();

// The memory of an array of any framework that speaks DLPack or the buffer protocol. False if it gives none; then
// `said` is what its __dlpack__ raised, if it did.
bool import_array(nb::handle object, nb::ndarray<nb::ro>& array, nb::object& said);

// Whole numbers from a list, or an array of any framework; Error, by name, for anything else.
std::vector<Index> indices(nb::handle object, std::string_view name);
std::optional<std::vector<Index>> optional_indices(nb::handle object, std::string_view name);

// One argument, or an Error that names it and says what to give.
Index whole_number(nb::handle object, std::string_view name, std::string_view wanted);
bool flag(nb::handle object, std::string_view name);

// [n, 6] array, or a list of (q_begin, q_end, k_begin, k_end, lo, hi) in which None is no limit.
std::vector<Slice> slices_from(nb::handle object);
nb::ndarray<nb::numpy, Index> slices_array(const std::vector<Slice>& slices);  // [n, 6]

// A list of runs a rank, each (row, token, count) or (row, token, count, stride).
std::vector<std::vector<Run>> runs_from(nb::handle object);

// [n], or [n / columns, columns].
template <class T>
nb::ndarray<nb::numpy, T> array_of(std::vector<T> values, std::size_t columns = 0) {
  const std::size_t shape[] = {columns == 0 ? values.size() : values.size() / columns, columns};
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(kept->data(), columns == 0 ? 1 : 2, shape, owner);
}

// A property that copies a field into an array.
template <class T>
auto copy_of(std::vector<Index> T::* field) {
  return [field](const T& object) { return array_of(object.*field); };
}

// dict_of("name", value, "other name", other value, ...)
template <class... Rest>
nb::dict dict_of(const Rest&... rest) {
  nb::dict out;
  const auto fill = [&out](const auto& self, const char* name, const auto& value, const auto&... more) -> void {
    out[name] = value;
    if constexpr (sizeof...(more) > 0) self(self, more...);
  };
  fill(fill, rest...);
  return out;
}

}  // namespace weft::python
