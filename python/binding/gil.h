// Python's lock (the GIL), taken and released so that threads may outlive the interpreter.
//
// When a process ends, Python ends every other thread that asks for the lock by unwinding it. That must not happen in
// C++ code, where a destructor that is unwound ends the whole process (std::terminate). Such a thread stays where it is
// instead, for the moments that the process still has.
#pragma once

#include <chrono>
#include <thread>
#include <type_traits>

#include <nanobind/nanobind.h>

namespace weft::python {

namespace nb = nanobind;

[[noreturn]] inline void stay_until_the_process_ends() {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

// What `call` returns; a thread that Python ends inside it stays. It calls functions of C, which throw nothing: what
// unwinds the guard is the end of the thread. (A catch clause would not do: libc++ passes them over then.)
template <class Call>
auto unless_python_ends(const Call& call) {
  struct Guard {
    bool returned = false;
    ~Guard() {
      if (!returned) stay_until_the_process_ends();
    }
  } guard;
  if constexpr (std::is_void_v<decltype(call())>) {
    call();
    guard.returned = true;
  } else {
    auto result = call();
    guard.returned = true;
    return result;
  }
}

// Other threads of Python run in its scope.
class ReleaseGil {
 public:
  ReleaseGil() : state_(PyEval_SaveThread()) {}
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;
  ~ReleaseGil() {
    unless_python_ends([&] { PyEval_RestoreThread(state_); });
  }

 private:
  PyThreadState* state_;
};

// Python code may run in its scope, in any thread.
class AcquireGil {
 public:
  AcquireGil() {
    // A thread that Python does not know, and that comes too late.
    if (!Py_IsInitialized() && PyGILState_GetThisThreadState() == nullptr) stay_until_the_process_ends();
    state_ = unless_python_ends([] { return PyGILState_Ensure(); });
  }
  AcquireGil(const AcquireGil&) = delete;
  AcquireGil& operator=(const AcquireGil&) = delete;
  ~AcquireGil() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

// Calls Python code from C++ code that Python did not call.
template <class... Args>
nb::object call_python(nb::handle function, const Args&... args) {
  PyObject* result =
      unless_python_ends([&] { return PyObject_CallFunctionObjArgs(function.ptr(), args.ptr()..., nullptr); });
  if (result == nullptr) throw nb::python_error();
  return nb::steal(result);
}

}  // namespace weft::python
