// How much memory one call takes, seen from outside the kernel.
#pragma once

#include <string>

#include "bench/case.h"

namespace weft::tool {

struct MemoryProbe {
  Index peak_bytes = 0;    // at the highest, inputs and outputs included
  Index tensor_bytes = 0;  // inputs and outputs
  double seconds = 0;      // of that one call, the process's first
};

// Runs the task once in a child process. A process with threads cannot fork one that uses them, so ask before the first
// kernel runs here.
MemoryProbe probe_memory(const BenchTask& task, const std::string& kernel, int threads);

}  // namespace weft::tool
