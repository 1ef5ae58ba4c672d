// Simulated timelines of a panel.
#pragma once

#include <vector>

#include "draw/figure.h"

namespace weft::draw {

// `all`: the schedule of every rank, in rank order. About `events` events of each pass are recorded: of all ranks, or
// of fewer ranks where these have more.
Timelines make_timelines(const std::vector<Schedule>& all, const TensorShape& shape, const Machine& machine,
                         Index events);

}  // namespace weft::draw
