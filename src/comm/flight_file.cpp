#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include "comm/flight.h"
#include "text.h"
#include "weft/error.h"
#include "weft/flight.h"

namespace weft {
namespace {

using detail::FlightRecorder;

// Never destroyed: calls of other threads may fail while the process ends.
struct Recorders {
  std::mutex mutex;
  std::vector<std::weak_ptr<FlightRecorder>> all;
  std::deque<std::shared_ptr<FlightRecorder>> kept;  // if there is a file: the last ones, those that have ended too
  FlightFile file;
};
std::atomic<bool> writes_failures = false;
std::atomic<int> signal_pipe = -1;  // what the handler writes to; -1: none, as after a fork

Recorders& recorders() {
  static Recorders* const only = [] {
    auto* made = new Recorders;
    // A process that is forked has neither the thread nor the file, and must not inherit a lock that another thread
    // has.
    ::pthread_atfork([] { recorders().mutex.lock(); }, [] { recorders().mutex.unlock(); },
                     [] {
                       signal_pipe = -1;
                       writes_failures = false;
                       recorders().file = {};
                       recorders().mutex.unlock();
                     });
    return made;
  }();
  return *only;
}

std::string records_of(const Recorders& r) {
  std::string lines;
  for (const std::weak_ptr<FlightRecorder>& each : r.all)
    if (const std::shared_ptr<FlightRecorder> recorder = each.lock()) lines += recorder->json() + "\n";
  return lines;
}

// Nothing that goes wrong here may hide what is being reported.
void write_now(const Recorders& r) noexcept {
  try {
    const std::string part = text(r.file.path, ".", ::getpid(), ".tmp");
    {
      std::ofstream out(part, std::ios::binary);
      out << records_of(r);
      out.close();
      if (out) {
        std::filesystem::rename(part, r.file.path);
        return;
      }
    }
    std::filesystem::remove(part);
  } catch (...) {
  }
}

extern "C" void weft_flight_signal(int) {
  const int saved = errno, to = signal_pipe.load();
  const ssize_t written = to < 0 ? 0 : ::write(to, "", 1);
  static_cast<void>(written);  // there is nobody to tell
  errno = saved;
}

// The handler may do next to nothing, so that a thread writes the file. It lives as long as the process.
void start_writer() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    throw Error(text("no pipe for the handler of a signal: ", std::strerror(errno)), "close some files");
  std::thread([from = ends[0]] {
    for (char byte;;) {
      const ssize_t n = ::read(from, &byte, 1);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return;
      Recorders& r = recorders();
      const std::lock_guard lock(r.mutex);
      if (!r.file.path.empty()) write_now(r);
    }
  }).detach();
  signal_pipe = ends[1];
}

void check_folder(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  if (::access(folder.empty() ? "." : folder.c_str(), W_OK | X_OK) != 0 || std::filesystem::is_directory(path))
    throw Error(text("flight records cannot be written to '", path, "'"),
                "name a file in a folder that can be written");
}

}  // namespace

namespace detail {

std::shared_ptr<FlightRecorder> make_recorder(Index rank, Index ranks, std::string_view name) {
  constexpr std::size_t kKept = 64;
  auto made = std::make_shared<FlightRecorder>(rank, ranks, name);
  Recorders& r = recorders();
  const std::lock_guard lock(r.mutex);
  std::erase_if(r.all, [](const auto& each) { return each.expired(); });
  r.all.push_back(made);
  if (!r.file.path.empty()) r.kept.push_back(made);
  if (r.kept.size() > kKept) r.kept.pop_front();
  return made;
}

void tell_of_failure() noexcept {
  if (!writes_failures.exchange(false)) return;  // the first one alone: what follows is its consequence
  Recorders& r = recorders();
  const std::lock_guard lock(r.mutex);
  if (!r.file.path.empty()) write_now(r);
}

}  // namespace detail

std::string flight_records() {
  Recorders& r = recorders();
  const std::lock_guard lock(r.mutex);
  return records_of(r);
}

void keep_flight_file(const FlightFile& file) {
  if (!file.path.empty()) check_folder(file.path);
  Recorders& r = recorders();
  const std::lock_guard lock(r.mutex);
  if (file.signal != 0 && !file.path.empty()) {
    if (signal_pipe < 0) start_writer();
    struct sigaction action = {};
    action.sa_handler = weft_flight_signal;
    action.sa_flags = SA_RESTART;
    if (::sigaction(file.signal, &action, nullptr) != 0)
      throw Error(text("signal ", file.signal, ": ", std::strerror(errno)),
                  "give one that can be handled, e.g. SIGUSR1");
  }
  if (r.file.signal != 0 && (file.path.empty() || file.signal != r.file.signal)) std::signal(r.file.signal, SIG_DFL);
  r.file = file;
  r.kept.clear();
  writes_failures = !file.path.empty() && file.on_failure;
}

}  // namespace weft
