// Checks of an executor's arguments against its schedule, before anything moves.
#pragma once

#include "weft/executor.h"

namespace weft::run {

void check_forward(const Schedule& schedule, const ExecutorForwardArgs& args);
void check_backward(const Schedule& schedule, const ExecutorBackwardArgs& args);

}  // namespace weft::run
