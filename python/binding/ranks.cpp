// Ranks that are threads of this process: weft.spawn.
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include "communicator.h"
#include "gil.h"
#include "index.h"
#include "module.h"
#include "text.h"
#include "weft/communicator.h"
#include "weft/error.h"

namespace weft::python {
namespace {

using namespace nb::literals;

// What a rank's thread does: begin(comm), fn(comm), end(comm).
struct Calls {
  nb::object fn, begin, end;
};

struct RankThread {
  nb::object result;
  nb::object raised;  // with its traceback
  std::string problem;
  unsigned long thread = 0;  // as Python names it, while the rank runs Python code
};

// Python's exception on its way through C++: the object itself is in RankThread.
struct Raised : std::exception {
  Raised(Index on, std::string said) : rank(on), text(std::move(said)) {}
  const char* what() const noexcept override { return text.c_str(); }
  Index rank;
  std::string text;
};

// State that the ranks' threads share with the thread that waits for them. Objects of Python in it are touched with the
// GIL.
struct Shared {
  Calls calls;
  Index ranks = 0;
  ThreadRanks how;
  std::vector<RankThread> all;
  std::stop_source stop = {};

  std::mutex mutex = {};
  std::condition_variable ended = {};
  bool over = false;
  std::exception_ptr failure = {};
};

// str(object), also where that raises or is not valid UTF-8.
std::string words(nb::handle object) {
  const nb::object said = nb::steal(PyObject_Str(object.ptr()));
  const nb::object bytes =
      said.is_valid() ? nb::steal(PyUnicode_AsEncodedString(said.ptr(), "utf-8", "replace")) : nb::object();
  if (bytes.is_valid()) return {PyBytes_AsString(bytes.ptr()), at(PyBytes_Size(bytes.ptr()))};
  PyErr_Clear();
  return text("something of type ", nb::type_name(object.type()).c_str());
}

std::string words_of(nb::handle object, const char* attribute, const char* otherwise) {
  const nb::object said = nb::steal(PyObject_GetAttrString(object.ptr(), attribute));
  if (said.is_valid()) return words(said);
  PyErr_Clear();
  return otherwise;
}

// An Error of Weft's goes through C++ as one, so that run_ranks can say which rank it was; others go as they are.
[[noreturn]] void pass_on(nb::python_error& e, Index rank, RankThread& mine) {
  mine.raised = nb::borrow(e.value());
  if (e.matches(nb::module_::import_("weft._core").attr("Error")) && nb::hasattr(e.value(), "problem")) {
    const std::string problem = words_of(e.value(), "problem", "");
    mine.problem = text("rank ", rank, ": ", problem);
    throw Error(problem, words_of(e.value(), "remedy", "see where it was raised"));
  }
  if (nb::hasattr(e.value(), "add_note")) e.value().attr("add_note")(text("on rank ", rank, " of weft.spawn"));
  throw Raised(rank, e.what());
}

// A rank's communicator as Python holds it, until the rank ends.
class Lent {
 public:
  Lent(const Calls& calls, Communicator& communicator, RankThread& mine) : calls_(calls), mine_(mine) {
    auto comm = std::make_unique<Comm>(communicator);
    held_ = comm.get();
    object = nb::cast(std::move(comm));
    mine_.thread = PyThread_get_thread_ident();
  }
  Lent(const Lent&) = delete;
  ~Lent() {
    const nb::error_scope raised;                      // stays so
    PyThreadState_SetAsyncExc(mine_.thread, nullptr);  // an interrupt that came too late
    mine_.thread = 0;
    try {
      call_python(calls_.end, object);
    } catch (nb::python_error& e) {
      e.discard_as_unraisable("the end of a rank");
    }
    held_->ended_or_not = nullptr;
    const ReleaseGil others_run;
    held_->turns->wait_until_free();  // a thread that the rank left behind may be in a call
  }

  nb::object object;

 private:
  const Calls& calls_;
  RankThread& mine_;
  Comm* held_;
};

void run_rank(Shared& shared, Communicator& communicator) {
  const AcquireGil gil;
  RankThread& mine = shared.all[at(communicator.rank())];
  try {
    const Lent comm(shared.calls, communicator, mine);
    if (shared.stop.stop_requested()) throw Error("the ranks were told to stop before they began", "run them again");
    call_python(shared.calls.begin, comm.object);
    mine.result = call_python(shared.calls.fn, comm.object);
  } catch (nb::python_error& e) {
    pass_on(e, communicator.rank(), mine);
  }
}

void run_all(const std::shared_ptr<Shared>& shared) {
  std::exception_ptr failure;
  try {
    ThreadRanks how = shared->how;
    how.stop = shared->stop.get_token();
    run_ranks(shared->ranks, [&](Communicator& c) { run_rank(*shared, c); }, how);
  } catch (...) {
    failure = std::current_exception();
  }
  const std::lock_guard lock(shared->mutex);
  shared->failure = std::move(failure);
  shared->over = true;
  shared->ended.notify_all();
}

// Runs ranks in threads of their own, so that the thread that waits for them can be interrupted. Ranks that do not end
// when they are told to go on without it; what they use lives as long as they do.
class Ranks {
 public:
  Ranks(Index ranks, nb::object fn, nb::object begin, nb::object end, double time_limit, double bandwidth,
        double latency)
      : shared_(std::make_shared<Shared>()) {
    shared_->calls = {std::move(fn), std::move(begin), std::move(end)};
    shared_->how = {.time_limit = time_limit, .bandwidth = bandwidth, .latency = latency};
    shared_->ranks = ranks;
    constexpr Index kNoMore = 1 << 17;  // run_ranks refuses fewer
    shared_->all.resize(at(max_of(0, min_of(ranks, kNoMore))));
  }
  Ranks(const Ranks&) = delete;
  ~Ranks() {
    if (thread_.joinable()) thread_.detach();
  }

  void start() {
    if (!Py_IsInitialized())
      throw Error("weft.spawn while Python ends", "call it before: threads that are started now could not run Python");
    try {
      thread_ = std::thread([shared = shared_]() mutable {
        run_all(shared);
        const AcquireGil gil;
        shared.reset();
      });
    } catch (const std::system_error& e) {
      throw Error(text("no thread could be started: ", e.what()), "end some of the others");
    }
  }

  // Whether all ranks have ended; waits so long for that.
  bool wait(double seconds) {
    if (!thread_.joinable()) return true;
    const ReleaseGil others_run;
    std::unique_lock lock(shared_->mutex);
    return shared_->ended.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return shared_->over; });
  }

  // Ranks that run Python code get a KeyboardInterrupt, those that wait for others an Error.
  void stop() {
    shared_->stop.request_stop();
    for (const RankThread& rank : shared_->all)
      if (rank.thread != 0) PyThreadState_SetAsyncExc(rank.thread, PyExc_KeyboardInterrupt);
  }

  // Of fn(communicator) on each rank, in their order. An exception of fn is raised here as it was; an Error of Weft's
  // names the rank, and has the one that was raised there as its cause.
  nb::list results() {
    {
      const ReleaseGil others_run;
      if (thread_.joinable()) thread_.join();
    }
    // Once: an exception's traceback refers to the caller, and that to this object.
    const std::vector<RankThread> all = std::exchange(shared_->all, {});
    const std::exception_ptr failure = std::exchange(shared_->failure, {});
    shared_->calls = {};
    try {
      if (failure) std::rethrow_exception(failure);
    } catch (const Raised& e) {
      const nb::object& raised = all[at(e.rank)].raised;
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
      throw nb::python_error();
    } catch (const Error& e) {
      nb::handle cause;
      for (const RankThread& rank : all)
        if (rank.raised.is_valid() && rank.problem == e.problem()) cause = rank.raised;
      raise_from(e, cause);
    }
    nb::list out;
    for (const RankThread& rank : all) out.append(rank.result);
    return out;
  }

 private:
  std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

}  // namespace

void bind_ranks(nb::module_& m) {
  nb::class_<Ranks>(m, "Ranks", "Ranks that are threads of this process. weft.spawn makes them.")
      .def(nb::init<Index, nb::object, nb::object, nb::object, double, double, double>(), "ranks"_a, "fn"_a, "begin"_a,
           "end"_a, "time_limit"_a, "bandwidth"_a, "latency"_a)
      .def("start", &Ranks::start)
      .def("wait", &Ranks::wait, "seconds"_a)
      .def("stop", &Ranks::stop)
      .def("results", &Ranks::results);
}

}  // namespace weft::python
