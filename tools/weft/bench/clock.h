// One clock for all timings of this process.
#pragma once

#include <chrono>
#include <ctime>

namespace weft::tool {

inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Of this thread's own work: others that run meanwhile do not count.
inline double thread_seconds_now() {
  std::timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

}  // namespace weft::tool
