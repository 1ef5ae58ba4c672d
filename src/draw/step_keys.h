// Which keys a step's buffer holds, found by following the moves of all ranks' schedules.
#pragma once

#include <vector>

#include "weft/schedule.h"

namespace weft::draw {

// Runs of the key tokens in a rank's buffer at a step, sorted by row. `all`: the schedule of every rank, in rank order.
std::vector<Run> keys_of_step(const std::vector<Schedule>& all, Index rank, Index step);

// The first step in which queries of one group of ranks meet keys of another; -1: never. One entry a distance
// (query's group - key's group) mod groups where the distance alone decides, otherwise a table [groups, groups].
std::vector<Index> meeting_steps(const std::vector<Schedule>& all);

}  // namespace weft::draw
