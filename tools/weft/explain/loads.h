// The load of each rank, in numbers.
#pragma once

#include <optional>
#include <vector>

#include "check/cases/case.h"
#include "weft/plan.h"
#include "weft/schedule.h"

namespace weft::tool {

// What follows from a rank's slices.
struct Touched {
  Index slices = 0;
  Index keys = 0;    // rows seen by at least one of the rank's queries
  Index remote = 0;  // of these, on other ranks
};

struct RankLoad {
  Index tokens = 0;  // real query tokens; the rest of the rank's rows is padding
  Index pairs = 0;
  double of_mean = 1;                   // pairs over the mean of all ranks
  std::optional<Touched> touched = {};  // not counted for every rank if that would take long
};

struct Loads {
  std::vector<RankLoad> ranks;
  double imbalance = 1;
  Index q_rows = 0;         // of each rank
  Index bytes_per_key = 0;  // K and V, all heads
  Index gathered_keys = 0;  // rows a rank receives if all ranks' K and V are gathered
  Index counted = 0;        // ranks whose slices were counted
};

// The buffer that the key rows of slices refer to: the whole stream, or the ranks' buffers concatenated.
RunList key_buffer(const Layouts& layouts, KeyOrder order);
Loads loads_of(const check::Case& c, const Problem& problem, const Layouts& layouts, KeyOrder order);

}  // namespace weft::tool
