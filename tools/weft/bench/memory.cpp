#include "bench/memory.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <new>
#include <stdexcept>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/clock.h"
#include "bench/operands.h"
#include "index.h"
#include "weft/error.h"

namespace weft::tool {
namespace {

using nlohmann::json;

// Lines of /proc/self/status: "VmHWM:     1234 kB".
struct Resident {
  Index highest = 0;  // all pages, at the highest
  Index own = 0;      // now: pages of the process itself
  Index file = 0;     // now: pages of programs and libraries
};

Resident resident_now() {
  Resident now;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    const auto read = [&](const char* key, Index& to) {
      if (line.starts_with(key)) to = std::stoll(line.substr(std::strlen(key))) * 1024;
    };
    read("VmHWM:", now.highest);
    read("RssAnon:", now.own);
    read("RssFile:", now.file);
  }
  return now;
}

// Code that is paged in during the call counts in the peak but is no workspace. It only grows, so its size at the end
// is subtracted.
json measure(const BenchTask& task, const std::string& kernel, int threads) {
  set_cpu_threads(threads);
  const Resident before = resident_now();
  Operands operands(task);
  const double start = seconds_now();
  operands.run(kernel);
  const double seconds = seconds_now() - start;
  const Resident after = resident_now();
  return {{"peak", after.highest - after.file - before.own}, {"tensors", operands.bytes()}, {"seconds", seconds}};
}

// The child's whole life. What is thrown goes to the parent as words.
[[noreturn]] void child(int to, const BenchTask& task, const std::string& kernel, int threads) {
  json answer;
  try {
    answer = measure(task, kernel, threads);
  } catch (const Error& error) {
    answer = {{"problem", error.problem()}, {"remedy", error.remedy()}};
  } catch (const std::bad_alloc&) {
    answer = {{"problem", fmt::format("{} {}: out of memory", task.name, name(task.pass))},
              {"remedy", "use fewer tokens or heads, or a smaller --dim"}};
  } catch (const std::exception& error) {
    answer = {{"failure", error.what()}};
  }
  const std::string text = answer.dump(-1, ' ', true, json::error_handler_t::replace);
  const bool written = ::write(to, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  ::_exit(written ? 0 : 1);  // nothing of the parent's is flushed or destroyed twice
}

std::string read_to_end(int from) {
  std::string text;
  char buffer[4096];
  for (ssize_t n; (n = ::read(from, buffer, sizeof buffer)) != 0;) {
    if (n > 0)
      text.append(buffer, at(n));
    else if (errno != EINTR)
      break;
  }
  return text;
}

}  // namespace

MemoryProbe probe_memory(const BenchTask& task, const std::string& kernel, int threads) {
  int ends[2];
  if (::pipe(ends) != 0) throw std::runtime_error(fmt::format("pipe: {}", std::strerror(errno)));
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid < 0) throw std::runtime_error(fmt::format("fork: {}", std::strerror(errno)));
  if (pid == 0) child(ends[1], task, kernel, threads);
  ::close(ends[1]);
  const json answer = json::parse(read_to_end(ends[0]), nullptr, false);
  ::close(ends[0]);
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (!answer.is_object())
    throw std::runtime_error(
        fmt::format("{} {}: the run that measures memory died (wait status {})", task.name, name(task.pass), status));
  if (answer.contains("problem")) throw Error(answer.at("problem"), answer.at("remedy"));
  if (answer.contains("failure")) throw std::runtime_error(answer.at("failure"));
  return {answer.at("peak"), answer.at("tensors"), answer.at("seconds")};
}

}  // namespace weft::tool
