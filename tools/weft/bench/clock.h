// One clock for all timings of this process, and the median that is told of them.
#pragma once

#include <algorithm>
#include <chrono>
#include <ctime>
#include <numeric>
#include <vector>

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

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : std::midpoint(values[half - 1], values[half]);
}

}  // namespace weft::tool
