// The groups of ranks whose keys a rank meets: of one rank each, of those that swapped heads for sequence, or, in a
// mesh, of those that attend each other's queries, where keys are those of the rank at the own place.
#pragma once

#include <algorithm>
#include <vector>

#include "index.h"
#include "weft/schedule.h"

namespace weft::schedule {

inline void append(std::vector<Range>& to, Range next) {
  if (!to.empty() && to.back().end == next.begin)
    to.back().end = next.end;
  else
    to.push_back(next);
}

class Groups {
 public:
  explicit Groups(const Schedule& s)
      : s_(s),
        size_(s.swap ? s.ulysses() : s.query_ranks),
        count_(s.ranks / size_),
        mine_(s.rank / size_),
        rows_(s.k_rows * s.ulysses()) {}

  Index count() const { return count_; }
  Index mine() const { return mine_; }
  Index rows() const { return rows_; }  // of K and V of a group
  // The group so far before the own one, or after it if the distance is negative, and this rank's peer there.
  Index at_distance(Index distance) const { return floor_mod(mine_ - distance, count_); }
  Index peer(Index group) const { return group * size_ + s_.rank % size_; }

  RunList keys(Index first, Index count = 1) const {
    if (s_.query_ranks > 1) return s_.layouts.k.rank_order({peer(first), count, size_});
    return s_.layouts.k.rank_order({first * size_, count * size_, 1});
  }
  RunList queries(Index first, Index count = 1) const {
    return s_.layouts.q.rank_order({first * size_, count * size_, 1});
  }
  // The rank whose queries are such a part of those that are attended here (StepDescription::queries).
  Index owner(Index part) const { return mine_ * size_ + floor_mod(s_.rank - part, size_); }
  Plan plan(Index part, Index group) const {
    return s_.query_ranks > 1 ? make_plan(s_.problem, s_.layouts.q.runs(owner(part)), keys(group)) : plan(group);
  }
  // Plan of the own queries against a group's keys, and keys of a group that so many groups' queries see.
  Plan plan(Index group) const { return make_plan(s_.problem, queries(mine_), keys(group)); }
  std::vector<Range> touched(Index first, Index count, Index keys_of) const {
    return touched_keys(make_plan(s_.problem, queries(first, count), keys(keys_of)));
  }

  // Which rows of a group go where in the gathered buffer: all of them, or those that hold tokens to their tokens.
  struct Placed {
    std::vector<Range> rows, to;
  };
  Placed placed(Index group, bool sequence_order) const {
    if (!sequence_order) return {{{0, rows_}}, {{group * rows_, (group + 1) * rows_}}};
    std::vector<Run> runs = keys(group).runs();
    std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.row < b.row; });
    Placed p;
    for (const Run& run : runs) {
      append(p.rows, {run.row, run.row + run.count});
      append(p.to, {run.token, run.token + run.count});
    }
    return p;
  }

 private:
  const Schedule& s_;
  Index size_, count_, mine_;  // ranks of a group, groups, the own group
  Index rows_;
};

// Adds a slice whose keys, and whose queries, lie so many rows further in the buffers at hand.
struct ShiftedBy {
  Index k = 0, q = 0;
};
void add_shifted(Slice s, ShiftedBy rows, std::vector<Slice>& to);
// Adds the slices of a plan against a group's rows, of which only `touched` are in the buffer, from row `first` on.
void add_touched(const Plan& plan, const std::vector<Range>& touched, Index first, std::vector<Slice>& slices);

// Moves in two hops, where so many groups are a node. Those of send_by_node are of the nodes at these distances; they
// add slices and rows to the plan.
Move gather_by_node(const Groups& groups, Index node, bool sequence_order);
// All rows of the node at this distance, which is met as a whole.
struct NodeAtDistance {
  Index first = 0;  // group
  Move move;
};
NodeAtDistance gather_node(const Groups& groups, Index node, Index distance);
struct Met {
  bool own = false;  // the own group too
};
Move send_by_node(const Groups& groups, Index node, Range distances, Met met, Plan& plan);

}  // namespace weft::schedule
