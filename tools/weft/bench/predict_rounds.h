// Candidates of one problem timed in turn, so that a slow moment of the machine meets all of them.
#pragma once

#include <vector>

#include "bench/schedule_runs.h"
#include "check/cases/case.h"
#include "weft/communicator.h"

namespace weft::tool {

// A schedule on a layout, with the tensors of that layout.
struct Candidate {
  const Layouts* layouts = nullptr;
  const RankOperands* tensors = nullptr;
  ScheduleOptions options;
};

// Seconds from the first rank's start to the last one's end, as if the reference before them had taken as long as it
// does in the median of all.
struct Measured {
  double forward = 0, backward = 0;
  double total() const { return forward + backward; }
};
struct MeasuredCandidates {
  double reference = 0;                       // the median
  std::vector<std::vector<Measured>> rounds;  // [candidate][round], after one that warms up
};

// All ranks keep an executor of each candidate.
MeasuredCandidates measure_in_turn(const check::Case& c, const Problem& problem,
                                   const std::vector<Candidate>& candidates, const ThreadRanks& world, Index rounds);

}  // namespace weft::tool
