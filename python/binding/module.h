// The functions by which each file adds its classes to weft._core, and how errors are raised.
#pragma once

#include <string>

#include <nanobind/nanobind.h>

namespace weft {
class Error;
}

namespace weft::python {

// weft.Error as Python raises it.
nanobind::object error_object(const Error& e);
// raise Error from cause; the cause may be missing.
[[noreturn]] void raise_from(const Error& e, nanobind::handle cause);

// A message of the core with Python's names in place of those of C++.
std::string in_python(std::string said);

void bind_tensor(nanobind::module_& m);
void bind_problem(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_command(nanobind::module_& m);
void bind_communicator(nanobind::module_& m);
void bind_cost(nanobind::module_& m);
void bind_draw(nanobind::module_& m);
void bind_layouts(nanobind::module_& m);
void bind_prepare(nanobind::module_& m);
void bind_ranks(nanobind::module_& m);
void bind_offsets_attention(nanobind::module_& m);
void bind_rows(nanobind::module_& m);
void bind_schedule_options(nanobind::module_& m);
void bind_support(nanobind::module_& m);
void bind_trees(nanobind::module_& m);

namespace torch {
void bind_op(nanobind::module_& m);
}

}  // namespace weft::python
