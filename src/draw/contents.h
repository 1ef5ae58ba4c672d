// Whose keys a step's buffer holds, followed through the moves of all ranks' schedules.
#pragma once

#include <vector>

#include "weft/schedule.h"

namespace weft::draw {

// Runs of tokens in rank's buffer at a step, by row. Schedules of all ranks, in order.
std::vector<Run> contents(const std::vector<Schedule>& all, Index rank, Index step);

// The step in which queries of one group meet keys of another: by the distance (query's - key's) mod groups where that
// decides, else [groups, groups]. -1: never.
std::vector<Index> meeting_steps(const std::vector<Schedule>& all);

}  // namespace weft::draw
