// When each rank computes and exchanges.
#pragma once

#include <vector>

#include "draw/scene.h"

namespace weft::draw {

// Schedules of all ranks, in order. `events`: about so many are kept of each pass, of fewer ranks where there are more.
Times make_times(const std::vector<Schedule>& all, const TensorShape& shape, const Machine& machine, Index events);

}  // namespace weft::draw
