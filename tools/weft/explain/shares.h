// Each rank's share of a problem, in numbers.
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

struct Share {
  Index tokens = 0;  // real query tokens; the rest of the rank's rows is padding
  Index pairs = 0;
  double of_mean = 1;
  std::optional<Touched> touched = {};  // not counted for every rank if that would take long
};

struct Shares {
  std::vector<Share> ranks;
  double balance = 1;
  Index q_rows = 0;         // of each rank
  Index bytes_per_key = 0;  // K and V, all heads
  Index gathered_keys = 0;  // rows a rank receives if all ranks' K and V are gathered
  Index counted = 0;        // ranks whose slices were counted
};

// KeyOrder: where the key rows of slices are counted, in the whole stream or in the ranks' buffers one after another.
RunList key_buffer(const Layouts& layouts, KeyOrder order);
Shares shares_of(const check::Case& c, const Problem& problem, const Layouts& layouts, KeyOrder order);

}  // namespace weft::tool
