// One clock for all timings of this process.
#pragma once

#include <chrono>

namespace weft::tool {

inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace weft::tool
