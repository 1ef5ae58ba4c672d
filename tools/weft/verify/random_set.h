// Checks many random cases on several threads; the result does not depend on their number.
#pragma once

#include <optional>
#include <string>

#include "check/cases/random_case.h"
#include "terminal/progress.h"
#include "verify/tally.h"

namespace weft::tool {

// How many of the cases are large; the seed of a case decides.
struct LargeShare {
  Index one_in = 0;  // 0: none
  check::Sizes sizes = {};
};

struct RandomSet {
  Index count = 0;
  unsigned long long seed = 0;  // case i is drawn from seed + i
  std::optional<LayoutKind> layout = {};
  Index threads = 1;
  Method method = {};
  LargeShare large = {};
  bool trees = false;  // and nothing else
  TimeLimit limit = {};
};

// Prints failures as they come, the first ten with the command that gives the case again.
Tally check_random(const RandomSet& set);

}  // namespace weft::tool
