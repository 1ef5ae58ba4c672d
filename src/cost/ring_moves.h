// What moves in the steps of a ring, for all who outline one.
#pragma once

#include "cost/costs.h"
#include "cost/outline.h"
#include "index.h"
#include "schedule/schedules.h"

namespace weft::cost {

// shift(distances, groups, each, adds): the pattern in which every rank sends rows of so many groups, `each` bytes a
// row and head, to each of its peers at these distances after its own group.
template <class Shift>
void add_ring_moves(Index groups, Index abreast, const Costs& costs, bool backward, const Shift& shift,
                    std::vector<StepOutline>& steps) {
  const Range next{abreast, abreast + 1};
  Index met = 0;  // groups in the last patterns, which steps that are alike share
  int kv = -1, gradients = -1;
  for (Index n = 1; n < static_cast<Index>(steps.size()); ++n) {
    StepOutline& step = steps[at(n)];
    const Range distances = schedule::ring_distances(groups, abreast, n);
    step.shifts = true;
    if (n == 1) {
      step.kv = shift(distances, 1, costs.kv_bytes(), false);
    } else {
      if (met != distances.size()) {
        met = distances.size();
        kv = shift(next, met, costs.kv_bytes(), false);
        if (backward) gradients = shift(next, met, costs.gradient_bytes(), true);
      }
      step.kv = kv;
      step.gradients = gradients;
    }
    const Range last{max_of(distances.begin, groups - abreast), distances.end};  // from there home, as far again
    if (backward && last.size() > 0)
      step.home = shift(Range{groups + 1 - last.end, groups + 1 - last.begin}, 1, costs.gradient_bytes(), true);
  }
}

}  // namespace weft::cost
