// A schedule whose moves carry rows of a source, from which each rank makes K and V itself.
#pragma once

#include <vector>

#include "weft/schedule.h"

namespace weft::schedule {

// Whether a step attends the rows that the step before it brought, for other heads. Of a source they are brought once.
bool same_rows_as_before(const Schedule& schedule, Index step);
// The moves of the source: one head takes the place of all K/V heads, and rows that serve several steps come once. It
// has no plans.
Schedule source_moves(const Schedule& schedule);
// Of each step of source_moves(), the tokens that the rows of its buffer hold; kNoToken where a row holds none.
std::vector<std::vector<Index>> tokens_of_moves(const Schedule& schedule);

}  // namespace weft::schedule
