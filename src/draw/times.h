// When each rank computes and exchanges.
#pragma once

#include <vector>

#include "draw/scene.h"

namespace weft::draw {

// Schedules of all ranks, in order.
Times make_times(const std::vector<Schedule>& all, const TensorShape& shape);

}  // namespace weft::draw
