// Plans of some sequences of a problem, for callers that look at few ranks of many.
#pragma once

#include <span>
#include <vector>

#include "weft/plan.h"

namespace weft {

// The sequences that hold tokens of the runs, in order.
std::vector<Index> sequences_in(const Stream& stream, const RunList& runs);
// As make_plan, of these sequences alone; a caller's own slices are planned whole. Does not check again that the runs
// were made for the problem's streams.
Plan make_plan(const Problem& problem, const RunList& q, const RunList& k, std::span<const Index> sequences);
// As the public pairs_by_rank, for slices that the caller has already; `all` is the layout's rank_order().
std::vector<Index> pairs_by_rank(std::span<const Slice> slices, const Layout& layout, const RunList& all);

}  // namespace weft
