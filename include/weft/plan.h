// Plans: global slices cut by query runs and key runs, in row numbers of the two buffers at hand.
#pragma once

#include <span>
#include <vector>

#include "weft/layout.h"
#include "weft/mask.h"
#include "weft/slice.h"

namespace weft {

// What one rank attends of one buffer of keys.
struct Plan {
  std::vector<Slice> slices;  // rows of the query buffer x rows of the key buffer; none is empty
  Index q_rows = 0, k_rows = 0;
};

// Plans the attention of one buffer of queries to one buffer of keys, in time near-linear in sequences and slices out.
// Throws Error if the strides of the two sides differ.
WEFT_API Plan make_plan(const Problem& problem, const RunList& q, const RunList& k);

// The number of visible (query, key) pairs of the plan.
WEFT_API Index visible_pairs(const Plan& plan);
// The key rows seen by at least one query, as sorted disjoint ranges.
WEFT_API std::vector<Range> touched_keys(const Plan& plan);

// The number of visible pairs of each rank's queries.
WEFT_API std::vector<Index> pairs_by_rank(const Problem& problem, const Layout& q);
// The load imbalance, largest over mean: 1 is perfect, and also what it is without any pairs.
WEFT_API double imbalance(std::span<const Index> pairs);

}  // namespace weft
