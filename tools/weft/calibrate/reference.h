// Calls of known cost. Other times are measured relative to them, so that other load on the machine, and the clock that
// it leaves for vector instructions, cancel.
#pragma once

#include "calibrate/kernel_call.h"
#include "calibrate/kernel_times.h"

namespace weft::tool {

// Seconds of CPU time that a small call of the CPU's kernel takes this thread with its tensors in the caches.
double reference_seconds();

// A learned case forward and backward, with its tensors where other calls have left them: what the clock and the memory
// of the moment make of these kernels. A faster clock alone makes memory no faster, so the small call says too much.
class ReferenceCalls {
 public:
  ReferenceCalls(DType dtype, Index dim);

  double seconds() { return forward_.call() + backward_.call(); }
  // The same as it was calibrated.
  static double usual_seconds(const KernelTimes& times, DType dtype, Index dim);

 private:
  Noise none_;
  KernelCall forward_, backward_;
};

}  // namespace weft::tool
