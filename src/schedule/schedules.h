// One function a schedule: adds the plans and steps of its rank.
//
// All but `exact` see groups of ranks, which are single ranks unless heads were swapped for sequence: group g holds the
// rows of its ranks one after another, and the rank's peers are those at its own place in the other groups.
#pragma once

#include "weft/schedule.h"

namespace weft::schedule {

struct Groups {
  explicit Groups(const Schedule& s)
      : inside(s.ranks_inside()), count(s.ranks / inside), mine(s.rank / inside), place(s.rank % inside) {}

  Index peer(Index group) const { return group * inside + place; }
  RunList::Members members(Index group) const { return {group * inside, inside, 1}; }

  Index inside, count, mine, place;
};

inline Index rows_in(const std::vector<Range>& ranges) {
  Index rows = 0;
  for (const Range& r : ranges) rows += r.size();
  return rows;
}

// Checks, and all of a schedule but its plans and steps.
Schedule begin(const Problem& problem, const Layouts& layouts, Index rank, const Heads& heads,
               const ScheduleOptions& options);

void check_mesh(const Schedule& s);  // Error unless the hybrid's mesh makes up the ranks
// .. every number among the options is one that some schedule can have, used by this one or not.
void check_options(const ScheduleOptions& options);
// .. bytes of such tensors can be counted in 64 bits.
void check_shape(const Layouts& layouts, Index heads_q, Index heads_k, const TensorShape& shape);
void swap_heads(Schedule& s, Index inside);
// Error unless the groups of heads that are gathered one after another can be.
void check_head_groups(const Schedule& s);
// Keys are gathered in the order of tokens, not of ranks.
bool in_sequence_order(const Schedule& s);
// Query heads of K/V heads [begin, end) of a step: one range, or Error.
Range query_heads(const Schedule& s, Range k);
// Steps of a ring of so many groups, and the one in which the group at a distance before the own one is met.
inline Index ring_steps(Index groups, Index abreast) { return 1 + ceil_div(groups - 1, abreast); }
inline Index ring_step_of(Index distance, Index abreast) { return ceil_div(distance, abreast); }
// Distances of a step: [begin, end).
inline Range ring_distances(Index groups, Index abreast, Index step) {
  return step == 0 ? Range{0, 1} : Range{(step - 1) * abreast + 1, min_of(step * abreast + 1, groups)};
}
// Peers at these distances are in this stage of exact: [begin, end).
inline Range stage_distances(Index ranks, Index stages, Index stage) {
  return {(ranks - 1) * stage / stages + 1, (ranks - 1) * (stage + 1) / stages + 1};
}

void all_gather(Schedule& s);
void ring(Schedule& s);
void exact(Schedule& s);

// One step on what the rank has, if nothing moves.
void stay(Schedule& s);

}  // namespace weft::schedule
