// weft._core: Weft's types and functions for Python. The package python/weft checks arguments and calls these.
#include "module.h"

#include <string>

#include "weft/error.h"
#include "weft/version.h"

namespace nb = nanobind;

namespace {
PyObject* error_type = nullptr;

// A message may quote a file, whose bytes may be invalid UTF-8.
nb::object readable(const std::string& said) {
  const std::string text = weft::python::in_python(said);
  return nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}
}  // namespace

// weft.Error with the text of `e`, and its two parts as attributes.
nb::object weft::python::error_object(const Error& e) {
  nb::object instance = nb::handle(error_type)(readable(e.what()));
  nb::setattr(instance, "problem", readable(e.problem()));
  nb::setattr(instance, "remedy", readable(e.remedy()));
  return instance;
}

void weft::python::raise_from(const Error& e, nb::handle cause) {
  const nb::object error = error_object(e);
  if (cause.is_valid()) nb::setattr(error, "__cause__", cause);
  PyErr_SetObject(error_type, error.ptr());
  throw nb::python_error();
}

NB_MODULE(_core, m) {
  // torch keeps operators, and what they refer to, until the process ends: not a leak of ours.
  nb::set_leak_warnings(false);
  m.doc() = "Weft's library; use it through the package weft.";
  m.attr("__version__") = weft::version();

  error_type = PyErr_NewExceptionWithDoc("weft.Error",
                                         "What was wrong, with the values (`problem`), and the way out (`remedy`).",
                                         PyExc_ValueError, nullptr);
  m.attr("Error") = nb::handle(error_type);
  nb::register_exception_translator([](const std::exception_ptr& caught, void*) {
    try {
      std::rethrow_exception(caught);
    } catch (const weft::Error& e) {
      PyErr_SetObject(error_type, weft::python::error_object(e).ptr());
    }
  });

  weft::python::bind_tensor(m);
  weft::python::bind_problem(m);
  weft::python::bind_layouts(m);
  weft::python::bind_communicator(m);
  weft::python::bind_ranks(m);
  weft::python::bind_schedule_options(m);
  weft::python::bind_attention(m);
  weft::python::bind_cost(m);
  weft::python::bind_prepare(m);
  weft::python::bind_trees(m);
  weft::python::bind_rows(m);
  weft::python::bind_offsets_attention(m);
  weft::python::bind_support(m);
  weft::python::bind_draw(m);
  weft::python::bind_command(m);
  weft::python::torch::bind_op(m);
}
