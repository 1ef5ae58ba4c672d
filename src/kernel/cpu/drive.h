// The CPU kernels behind the registry: a call cut into work, shared among threads.
#pragma once

#include "kernel/cpu/target.h"

namespace weft::cpu {

void forward(const Target& target, const KernelForwardArgs& args);
void backward(const Target& target, const KernelBackwardArgs& args);

}  // namespace weft::cpu
