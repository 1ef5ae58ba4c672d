// Compiled apart for each combination of runs (src/CMakeLists.txt).
#pragma once

#include "plan/cuda/plan_job.h"

namespace weft {

template <class Queries, class Keys>
void launch_plan(const PlanArgs& args, const detail::ContextData& context) {
  launch_scan(PlanJob<Queries, Keys>{args}, context);
}

}  // namespace weft
