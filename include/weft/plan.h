// Global slices cut by query runs and key runs: what one rank attends, in rows of the two buffers at hand.
#pragma once

#include <span>
#include <vector>

#include "weft/config.h"
#include "weft/layout.h"
#include "weft/mask.h"
#include "weft/slice.h"

namespace weft {

struct Plan {
  std::vector<Slice> slices;  // rows of the query buffer x rows of the key buffer; none is empty
  Index q_rows = 0, k_rows = 0;
};

// Time near-linear in sequences + slices out. Error if the strides of the two sides differ.
WEFT_API Plan make_plan(const Problem& problem, const RunList& q, const RunList& k);

WEFT_API Index visible_pairs(const Plan& plan);
// Key rows seen by at least one query, as sorted disjoint ranges.
WEFT_API std::vector<Range> touched_keys(const Plan& plan);

// Visible pairs of each rank's queries, and the largest share over the mean (1 is even; 1 too if there are none).
WEFT_API std::vector<Index> pairs_by_rank(const Problem& problem, const Layout& q);
WEFT_API double balance(std::span<const Index> pairs);

}  // namespace weft
