// Schedules of problems whose lengths only a device knows: what moves depends on rows alone, and which ranks' rows meet
// in a step is known, so that each plan can be made on the device, in a captured CUDA graph too.
#pragma once

#include <vector>

#include "weft/layout.h"
#include "weft/schedule.h"

namespace weft {

// Rows of each rank's buffers, whatever documents lie in them.
struct Capacity {
  Index ranks = 1, rank = 0;
  Index q_rows = 0, k_rows = 0;
};

// The ranks whose rows of queries and of keys a plan is about, each side in rank order: members of
// DeviceLayout::rank_order.
struct MetRanks {
  RunList::Members q, k;
};

// A schedule, and what its plans are about. The executor takes the true plans as ExecutorForwardArgs::device_plans.
struct CapacitySchedule {
  Schedule schedule;          // its plans let every row see every row
  std::vector<MetRanks> met;  // of each plan
};

// As make_schedule; a ring meets one group of ranks a step. Error for schedules whose messages depend on lengths, and
// for keys in sequence order, where only lengths say which row goes where.
WEFT_API CapacitySchedule capacity_schedule(const Capacity& capacity, const Heads& heads, ScheduleOptions options);

}  // namespace weft
