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

void swap_heads(Schedule& s, Index inside);

void all_gather(Schedule& s);
void ring(Schedule& s);
void exact(Schedule& s);

// One step on what the rank has, if nothing moves.
void stay(Schedule& s);

}  // namespace weft::schedule
