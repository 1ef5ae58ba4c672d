// The steps of a schedule that run on the same tensors: all of them, or those of one head group of a swap.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "index.h"
#include "weft/schedule.h"

namespace weft::run {

class StepList {
 public:
  // All steps. Not explicit, so that a schedule stands for its steps; it must outlive the list.
  // NOLINTNEXTLINE(google-explicit-constructor)
  StepList(const Schedule& schedule)
      : steps_(schedule.steps), plans_(schedule.plans), own_queries_(schedule.q_rows * schedule.ulysses()) {
    count_moves();
  }
  // Those of a head group; the tensors at hand have its heads alone.
  StepList(const Schedule& schedule, Index head_group) : StepList(schedule) {
    const auto before = [&](Index group) {
      return std::partition_point(steps_.begin(), steps_.end(),
                                  [&](const Step& step) { return step.head_group < group; }) -
             steps_.begin();
    };
    first_ = before(head_group);
    steps_ = steps_.subspan(at(first_), at(before(head_group + 1) - first_));
    swapped_ = true;
    count_moves();
  }

  Index size() const { return static_cast<Index>(steps_.size()); }
  Index first() const { return first_; }  // its number in the schedule
  const Step& operator[](Index n) const { return steps_[at(n)]; }
  // The step that brought the keys of step n: itself, one before it, or -1 if they are the rank's own.
  Index source(Index n) const { return sources_[at(n)]; }
  // The next step after n that moves keys; size() if there is none.
  Index next_move(Index n) const {
    for (++n; n < size() && !steps_[at(n)].move;) ++n;
    return n;
  }
  // How many steps before it move keys: two buffers take turns.
  Index turn(Index n) const { return turns_[at(n)]; }
  // Whether no later step reads the keys that this one reads.
  bool ends_keys(Index n) const { return n + 1 == size() || !steps_[at(n + 1)].again; }
  bool about_others(Index n) const { return steps_[at(n)].queries.begin >= own_queries_ && own_queries_ > 0; }

  std::span<const Plan> plans() const { return plans_; }
  std::span<const Slice> slices(Index n) const { return plans_[at(steps_[at(n)].plan)].slices; }
  // Heads of step n among those of the tensors at hand.
  Range heads_q(Index n) const { return among(steps_[at(n)].heads_q); }
  Range heads_k(Index n) const { return among(steps_[at(n)].heads_k); }

 private:
  void count_moves() {
    sources_.clear();
    turns_.clear();
    for (Index moves = 0, last = -1, n = 0; n < size(); ++n) {
      const Step& step = steps_[at(n)];
      if (step.move) last = n;
      sources_.push_back(step.move || step.again ? last : -1);
      turns_.push_back(step.again ? moves - 1 : moves);
      moves += step.move ? 1 : 0;
    }
  }
  Range among(Range heads) const { return swapped_ ? Range{0, heads.size()} : heads; }

  std::span<const Step> steps_;
  std::span<const Plan> plans_;
  std::vector<Index> sources_, turns_;
  Index own_queries_ = 0;
  Index first_ = 0;
  bool swapped_ = false;
};

}  // namespace weft::run
