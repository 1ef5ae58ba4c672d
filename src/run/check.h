// What a call must look like; Error before anything moves.
#pragma once

#include "weft/executor.h"

namespace weft::run {

void check_forward(const Schedule& schedule, const ForwardArgs& args);
void check_backward(const Schedule& schedule, const BackwardArgs& args);

}  // namespace weft::run
