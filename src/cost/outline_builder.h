// Outlines a described schedule. Whether all ranks are planned (outline_job.cpp) or a few stand for all (estimate.cpp),
// what moves in a step and which steps attend which keys follow from the description alone.
#pragma once

#include "cost/costs.h"
#include "cost/outline.h"
#include "schedule/build.h"

namespace weft::cost {

class OutlineBuilder {
 protected:
  // `base` is a schedule without steps; `machine` and `shape` must outlive the builder.
  OutlineBuilder(Schedule base, schedule::Description description, const Machine& machine, const TensorShape& shape,
                 Pass pass);
  ~OutlineBuilder() = default;

  // Patterns of exchanges, where `each` is bytes of a row and K/V head and gradients go `back` to be added.
  // Member i of a group gets bytes[i] from each of the others.
  virtual Pattern swap(const std::vector<double>& bytes, bool back, bool adds) const = 0;
  // All groups' keys to everybody, or those of a node.
  virtual Pattern gather(Index step, double each, bool back) const = 0;
  // Of a move in two hops: rows into other nodes. gather() and send() are then about the hop inside nodes.
  virtual Pattern enter(Index step, double each, bool back) const = 0;
  // Every rank sends the rows of so many groups to each of its peers at these distances after its own group.
  virtual Pattern shift(Index step, Range distances, Index groups, double each, bool adds) = 0;
  virtual Pattern send(Index step, double each, bool back) const = 0;  // the rows that are seen
  // Of a mesh: so many bytes from each rank to the one so many places after it, or back.
  virtual Pattern query_move(Index places, double bytes, bool back) const = 0;

  struct HeadCounts {
    Index q = 0, k = 0;
    bool shares = false;  // K/V heads that the head group before had
    Index moved = 0;      // K/V heads that move, or 1: a source, to all that have heads in any head group
  };
  // What ranks at the same place in their groups have in common.
  struct Place {
    Frame frame;
    std::vector<HeadCounts> heads;  // by step; one if all steps have the same
    const HeadCounts& of(Index step) const { return heads[heads.size() == 1 ? 0 : at(step)]; }
  };
  Place place(Index n);

  Index steps() const { return static_cast<Index>(description_.steps.size()); }
  const schedule::StepDescription& step(Index n) const { return description_.steps[at(n)]; }
  Index ranks() const { return base_.ranks; }
  // Steps that meet the same keys are one meeting: they attend the same slices, for other heads each.
  Index meetings() const { return static_cast<Index>(meetings_.size()); }
  const std::vector<Index>& steps_of(Index meeting) const { return meetings_[at(meeting)]; }
  Index first_step(Index meeting) const { return steps_of(meeting).front(); }
  // The first step that meets the same keys as step n, for other heads.
  Index first_alike(Index n) const {
    const Index before = schedule::step_of_same_keys(description_, n);
    return before < 0 ? n : first_alike(before);
  }
  // Where a group stands among those whose keys another one meets, in the order of steps; and which meeting that is.
  Index met_at(Index group, Index source) const;
  Index meeting_at(Index place) const { return meeting_at_[at(place)]; }
  Index group_rows() const { return base_.k_rows * ulysses_; }  // K/V rows of a group
  std::vector<Index> key_rows() const;                          // by step; 0 where it depends on what is seen

  // To be called first; o_.ranks must be known.
  void add_head_groups();
  void add_moves();
  // Passes over rows of a rank, or of a sample that stands for some.
  void add_rows(Index rank, const Place& at_place, bool partial);
  int add(Pattern pattern);
  // Adds the kernel calls of a rank that sees these meetings; returns their pairs. work_of(n, heads): of seen[n].
  template <class WorkOf>
  double add_work(Index rank, const Place& at_place, const std::vector<Index>& seen, const std::vector<Index>& rows,
                  bool partial, const WorkOf& work_of);
  // The rank needs so much memory; the most of all ranks is kept. `relayed`: rows of relay buffers by step, if any.
  void add_memory(const Place& at_place, const std::vector<Index>& rows, bool partial,
                  const std::vector<Index>& relayed = {}, const std::vector<bool>& computed = {});
  // Of a mesh: kernel calls and memory of a rank; returns its pairs. The step that is about such a part of the queries
  // and the keys of the group at such a distance.
  double add_mesh_work(Index rank, const Place& at_place, const std::vector<TileWork>& by_step);
  Index mesh_step(Index part, Index distance) const;
  Index query_ranks() const { return description_.query_ranks; }
  // The rank whose queries are such a part of those that a rank attends.
  Index query_owner(Index rank, Index part) const {
    return rank / query_ranks() * query_ranks() + floor_mod(rank - part, query_ranks());
  }
  bool relays() const { return description_.node > 1; }
  bool relays(Index n) const { return moves(n) && schedule::relays(description_, step(n)); }
  // Not if it attends rows of a source that the step before it brought, for other heads.
  bool moves(Index n) const {
    return step(n).move &&
           !(costs_.source() && !base_.swap && n > 0 && schedule::step_of_same_keys(description_, n) == n - 1);
  }
  Index node() const { return description_.node; }  // groups of a node

  Pass pass_;
  Costs costs_;
  Schedule base_;
  schedule::Description description_;
  Index ulysses_, groups_;
  Index spacing_;  // ranks from one group to the next
  Outline o_;

 private:
  Index alike(Index n) const;
  void add_shift(Index n);
  // From the groups at these distances before the own one back to where it came from.
  Range way_back(Range distances) const { return {groups_ + 1 - distances.end, groups_ + 1 - distances.begin}; }

  std::vector<std::vector<Index>> meetings_;  // steps of each
  std::vector<Index> meeting_at_;             // by place
  bool by_node_ = false;                      // steps count distances in nodes
  bool parts_ = false;                        // some steps are about a part of the heads
  Index memory_steps_ = 0;                    // no later step needs larger buffers
  Range shared_ = {};  // relays of the last shift: steps of a head group that are alike share patterns
  int shared_kv_ = -1, shared_gradients_ = -1;
};

template <class WorkOf>
double OutlineBuilder::add_work(Index rank, const Place& at_place, const std::vector<Index>& seen,
                                const std::vector<Index>& rows, bool partial, const WorkOf& work_of) {
  double pairs = 0;
  for (std::size_t n = 0; n < seen.size(); ++n) {
    for (const Index step : meetings_[at(seen[n])]) {
      const HeadCounts& heads = at_place.of(step);
      if (heads.q == 0) continue;
      const TileWork work = work_of(n, heads);
      const StepFrame shape{.key_rows = rows[at(step)], .heads_q = heads.q, .heads_k = heads.k};
      o_.steps[at(step)].work.push_back(costs_.work(rank, at_place.frame, shape, work, partial, n == 0));
      pairs += work.pairs;
    }
  }
  return pairs;
}

}  // namespace weft::cost
