// Plans and counts of a part of a problem, for those who look at few ranks of many.
#pragma once

#include <span>
#include <vector>

#include "weft/plan.h"

namespace weft {

// Sequences that hold tokens of the runs, in order.
std::vector<Index> sequences_in(const Stream& stream, const RunList& runs);
// As make_plan, of these sequences alone; a caller's own slices are planned whole. That the runs' streams are the
// problem's is not asked again.
Plan make_plan(const Problem& problem, const RunList& q, const RunList& k, std::span<const Index> sequences);
// As the public one, for slices at hand; `all` is the layout's rank_order().
std::vector<Index> pairs_by_rank(std::span<const Slice> slices, const Layout& layout, const RunList& all);

}  // namespace weft
