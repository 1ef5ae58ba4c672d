// What the arguments of every kernel must satisfy. Each function throws Error and writes nothing.
#pragma once

#include "kernel/inputs.h"
#include "weft/kernel.h"

namespace weft {

void check_inputs(const Inputs& in);
void check_forward(const KernelForwardArgs& args);
void check_backward(const KernelBackwardArgs& args);
// Sink and outputs of a forward for so many rows, heads and columns of v.
void check_outputs(const FinishArgs& args, Index rows, Index heads, Index dim);
// Error if there is one: for code that reads slices on the host.
void refuse_device_plan(const DevicePlan* plan);

// The outputs of a forward call, the sink that enters them and, if there are any, the partial states.
FinishArgs finish_args(const KernelForwardArgs& args);

}  // namespace weft
