// The steps of a schedule that run on the same tensors: all of them, or those of one head group of a swap.
#pragma once

#include <algorithm>
#include <span>

#include "index.h"
#include "weft/schedule.h"

namespace weft::run {

class StepList {
 public:
  // All steps. Not explicit, so that a schedule stands for its steps; it must outlive the list.
  StepList(const Schedule& schedule) : steps_(schedule.steps), plans_(schedule.plans) {}
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
  }

  Index size() const { return static_cast<Index>(steps_.size()); }
  Index first() const { return first_; }  // its number in the schedule
  const Step& operator[](Index n) const { return steps_[at(n)]; }
  std::span<const Plan> plans() const { return plans_; }
  std::span<const Slice> slices(Index n) const { return plans_[at(steps_[at(n)].plan)].slices; }
  // Heads of step n among those of the tensors at hand.
  Range heads_q(Index n) const { return among(steps_[at(n)].heads_q); }
  Range heads_k(Index n) const { return among(steps_[at(n)].heads_k); }

 private:
  Range among(Range heads) const { return swapped_ ? Range{0, heads.size()} : heads; }

  std::span<const Step> steps_;
  std::span<const Plan> plans_;
  Index first_ = 0;
  bool swapped_ = false;
};

}  // namespace weft::run
