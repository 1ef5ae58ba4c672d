// Measures the machine at hand: kernels by slices, passes over rows, ranks that are threads.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "calibrate/kernel_call.h"
#include "calibrate/kernel_times.h"
#include "flags/flags.h"
#include "weft/cost.h"

namespace weft::tool {

// The calling thread stays on one core: ranks [n·ranks/cores, (n + 1)·ranks/cores) on core n. Machines that are
// measured this way have processor_ranks = ranks_a_core(ranks) and processor_kernels = 1. And it sleeps no longer than
// it asks to, as far as that depends on its timers, so that slowed links have the speed that they should have.
void stay_on_core(Index rank, Index ranks);
Index ranks_a_core(Index ranks);

// The machine whose processors take so many times as long; its links are as fast as before.
Machine slowed(const Machine& machine, double times);

struct Calibration {
  Machine machine;
  KernelTimes times;  // as measured, in seconds of the same clock
  std::shared_ptr<Noise> noise;
};
struct CalibrateOptions {
  std::vector<DType> dtypes = {DType::f32};
  std::vector<Index> dims = {64, 128};
  std::string kernel = "cpu";  // or one of a GPU
  Index rounds = 5;
  bool show = false;          // print the cases and the errors of the fit
  KernelTimes measured = {};  // read from a file: these instead of measuring
};
Calibration calibrate(const CalibrateOptions& options);

// weft bench --calibrate FILE, --check-kernels.
int bench_calibrate(const Flags& flags);
int bench_check_kernels(const Flags& flags);

}  // namespace weft::tool
