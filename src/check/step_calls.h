// The kernel calls of one rank's schedule without its moves, for timing: keys of all steps lie in one tensor, those of
// one step after those of another.
#pragma once

#include <string_view>

#include "run/executor_data.h"
#include "weft/kernel.h"
#include "weft/schedule.h"

namespace weft::check {

class StepCalls {
 public:
  explicit StepCalls(Schedule schedule)
      : schedule_(std::move(schedule)), computed_(schedule_), rows_(run::rows_of_steps(schedule_)) {}

  // As the executor calls a kernel that takes QuerySteps; slices of `args` are not looked at.
  void forward(const ForwardArgs& args, std::string_view kernel) const {
    QuerySteps steps{.rows = rows_.rows, .ends = rows_.ends};
    for (std::size_t n = 0; n < schedule_.steps.size(); ++n) {
      if (!computed_(static_cast<Index>(n))) continue;
      KernelForwardArgs call{args};
      steps.last = static_cast<Index>(n) == computed_.last();
      call.steps = &steps;
      call.k = part(args.k, n);
      call.v = part(args.v, n);
      call.slices = run::slices_of(schedule_, schedule_.steps[n]);
      attend(call, kernel);
    }
  }

  // dK and dV are f32; those of a ring are added to, which stands for the addition of sums that travel.
  void backward(const BackwardArgs& args, std::string_view kernel) const {
    QuerySteps steps{.rows = rows_.rows};
    for (std::size_t n = 0; n < schedule_.steps.size(); ++n) {
      if (!computed_(static_cast<Index>(n))) continue;
      KernelBackwardArgs call{args};
      steps.last = static_cast<Index>(n) == computed_.last();
      if (!call.deterministic) call.steps = &steps;
      call.k = part(args.k, n);
      call.v = part(args.v, n);
      call.dk = part(args.dk, n);
      call.dv = part(args.dv, n);
      call.slices = run::slices_of(schedule_, schedule_.steps[n]);
      call.add_keys = schedule_.options.kind == ScheduleKind::ring;
      attend_backward(call, kernel);
    }
  }

 private:
  Index first_row(std::size_t n) const {
    Index first = 0;
    for (std::size_t before = 0; before < n; ++before) first += schedule_.steps[before].key_rows;
    return first;
  }
  template <class View>
  View part(View view, std::size_t n) const {
    view.data = detail::advanced(view.data, view.dtype, first_row(n) * view.row_stride);
    view.rows = schedule_.steps[n].key_rows;
    return view;
  }

  Schedule schedule_;
  run::Computed computed_;
  run::RowsOfSteps rows_;
};

}  // namespace weft::check
