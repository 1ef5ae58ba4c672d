// Makes one rank's schedule of a description.
#pragma once

#include "schedule/description.h"

namespace weft::schedule {

inline Index rows_in(const std::vector<Range>& ranges) {
  Index rows = 0;
  for (const Range& r : ranges) rows += r.size();
  return rows;
}

Shape shape_of(const Layouts& layouts, const Heads& heads);
// Checks rank, layouts and heads: all of a schedule but its swap, plans and steps.
Schedule unscheduled(const Problem& problem, const Layouts& layouts, Index rank, const Heads& heads,
                     const ScheduleOptions& options);
// Error unless the capability table has the schedule on such layouts, and with a source if one moves.
void require_layouts(const ScheduleOptions& options, const Layouts& layouts, bool source = false);
// Groups of so many ranks swap heads for sequence, in so many head groups.
void swap_heads(Schedule& s, Index ulysses, Index head_groups);
// So many neighbouring ranks attend each other's queries.
void move_queries(Schedule& s, Index query_ranks);
// Bytes of a row and head: what is swapped as queries and as keys.
struct SwapBytes {
  Index q = 0, k = 0;
};
// Bytes of a query row and head that move to another rank, and of what comes back.
struct QueryBytes {
  Index there = 0, back = 0;
};
QueryBytes query_bytes(const TensorShape& shape, Pass pass);
// Bytes that each member of a group of ranks gets from every other one as a head group is swapped in, or sends to it as
// it goes `home`.
std::vector<Index> swapped_bytes(const Schedule& s, Index head_group, SwapBytes bytes, bool home);
// Whether gradients of keys go home after the head group, those of some rank at least.
bool keys_end(const Swap& swap, Index head_group);

// Heads of a step, of those that the rank has after the swap.
struct StepHeads {
  Range q, k;
};
// Error if the query heads of the K/V heads are no range.
StepHeads step_heads(const Schedule& s, const StepDescription& step);

// Error unless bytes of such tensors can be counted in 64 bits.
void check_shape(const Layouts& layouts, Index heads_q, Index heads_k, const TensorShape& shape);

}  // namespace weft::schedule
