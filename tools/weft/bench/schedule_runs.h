// One pass of one schedule on ranks that are threads, timed.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bench/operands.h"
#include "weft/schedule.h"
#include "weft/trace.h"

namespace weft::tool {

struct ScheduleRun {
  double seconds = 0;         // from the first rank's start to the last one's end
  double waiting = 0;         // of the rank that waited longest
  Traffic traffic = {};       // of the rank that received most
  Index first_bytes = 0;      // into that rank before its first step that needs any
  Index workspace_bytes = 0;  // of the rank that holds most
};

// Ranks' shards of random tensors, made once for all runs of a layout.
using RankOperands = std::vector<std::unique_ptr<Operands>>;
RankOperands rank_operands(const check::Case& c, const Layouts& layouts);

struct ScheduleTask {
  std::string name;
  ScheduleOptions options;
};

ScheduleRun run_schedule(const check::Case& c, const Problem& problem, const Layouts& layouts,
                         const RankOperands& tensors, const ScheduleTask& task, Pass pass, const std::string& kernel,
                         const ThreadRanks& world,
                         Trace* trace = nullptr);  // the steps of all ranks, if given

}  // namespace weft::tool
