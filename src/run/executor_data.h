// An executor from inside.
#pragma once

#include <chrono>

#include "index.h"
#include "run/agreement.h"
#include "run/in_use.h"
#include "run/seat.h"
#include "run/workspace.h"
#include "weft/executor.h"

namespace weft {
struct Executor::Parts {
  Parts(Communicator& world, Schedule what, ExecutorOptions how)
      : schedule(std::move(what)),
        options(std::move(how)),
        seat(world, options.place, options.memory),
        communicator(&seat.communicator()),
        workspace(seat.memory()) {}

  // Error if the one that was asked for, or none, can do the call: before anything moves.
  Kernel kernel_for(Pass pass, const ConstTensorView& q, const ConstTensorView& v, const Place& place) const;
  void attend_steps(const Kernel& kernel, const ForwardArgs& args);
  void attend_steps_backward(const Kernel& kernel, const BackwardArgs& args, const run::Kv& own);

  Schedule schedule;
  ExecutorOptions options;
  run::Seat seat;
  Communicator* communicator;
  std::unique_ptr<run::Agreement> agreement;  // if checked; `communicator` is then its own
  run::Workspace workspace;
  run::InUse in_use;
};

namespace run {

// Tells the observer what happened; costs nothing without one.
class Log {
 public:
  Log(const ExecutorOptions& options, Pass pass, const Schedule& schedule)
      : observer_(options.observer), pass_(pass), schedule_(schedule), start_(Clock::now()) {}

  template <class Do>
  auto operator()(StepEvent::Kind kind, Index step, const Do& what) {
    const double begin = observer_ ? seconds() : 0;
    struct Tell {
      Log& log;
      StepEvent event;
      ~Tell() noexcept(false) {
        if (!log.observer_ || std::uncaught_exceptions() > 0) return;
        event.end = log.seconds();
        log.observer_(event);
      }
    } tell{*this,
           {.kind = kind,
            .pass = pass_,
            .step = step,
            .steps = static_cast<Index>(schedule_.steps.size()),
            .slices = slices(step),
            .begin = begin,
            .end = begin}};
    return what();
  }

 private:
  using Clock = std::chrono::steady_clock;

  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  Index slices(Index step) const {
    const Step& s = schedule_.steps[at(step)];
    return static_cast<Index>(schedule_.plans[at(s.plan)].slices.size());
  }

  const std::function<void(const StepEvent&)>& observer_;
  Pass pass_;
  const Schedule& schedule_;
  Clock::time_point start_;
};

// The part of a call that a step's heads are.
struct StepHeads {
  Attention attention;
  std::vector<Index> map;  // attention.head_map refers to it
};
StepHeads heads_of_step(const Attention& attention, const Step& step);

std::span<const Slice> slices_of(const Schedule& schedule, const Step& step);

// Query rows that slices of some step hold, apart where no slice goes on, and their last calls of the kernel:
// QuerySteps.
struct RowsOfSteps {
  std::vector<Range> rows;
  std::vector<Index> ends;
};
RowsOfSteps rows_of_steps(const Schedule& schedule);

// Which steps call the kernel: those with something to see.
class Computed {
 public:
  explicit Computed(const Schedule& schedule);

  bool operator()(Index step) const { return steps_[at(step)]; }
  Index last() const { return last_; }  // that does; -1: none
  // No query head is in two of them, so that results need no merging.
  bool once() const { return once_; }
  // Steps of heads that see nothing in any step, one for each such range.
  const std::vector<Step>& blind() const { return blind_; }

 private:
  std::vector<bool> steps_;
  Index last_ = -1;
  bool once_ = true;
  std::vector<Step> blind_;
};

}  // namespace run
}  // namespace weft
