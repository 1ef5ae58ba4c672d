// The private data of an executor, and what forward and backward share.
#pragma once

#include <chrono>

#include "index.h"
#include "kernel/registry.h"
#include "run/agreement.h"
#include "run/execution_context.h"
#include "run/step_list.h"
#include "run/workspace.h"
#include "weft/executor.h"

namespace weft {
namespace run {
struct SourceCall;
struct SourceMoves;
// Collective, if the options say checked; else null. Error if the ranks' schedules or options differ.
std::unique_ptr<Agreement> agree(Communicator& ranks, const Schedule& schedule, const ExecutorOptions& options);
}  // namespace run

struct Executor::Data {
  Data(Communicator& world, Schedule what, ExecutorOptions how)
      : schedule(std::move(what)),
        options(std::move(how)),
        agreement(run::agree(world, schedule, options)),
        sign(world.ranks() > 1 && !options.checked ? run::sign_of(schedule, options) : detail::CallSign{}),
        context(agreement ? agreement->communicator() : world, options.place, options.memory),
        communicator(&context.communicator()),
        workspace(context.memory()) {}

  // The kernel of the options that can do the call. Error if there is none.
  Kernel kernel_for(KernelRequest request, bool device_plans) const;
  // The fingerprint of a pass, which its messages carry. Checked ranks have compared more than that already.
  template <class Args>
  std::optional<detail::SignedPass> begin_pass(const Args& kernel_args, Index layer, const Source* source,
                                               detail::PassKind kind) const {
    if (agreement != nullptr || communicator->ranks() == 1) return std::nullopt;
    // O, LSE and their gradients travel with heads that are swapped, and in a backward with queries.
    const bool queries = kind == detail::PassKind::backward && !schedule.query_moves.empty();
    const run::SignedCallInfo info{.layer = layer,
                                   .swapped = schedule.swap.has_value() || queries,
                                   .source = source != nullptr ? source->rows.dim : 0};
    return std::optional<detail::SignedPass>(std::in_place, *communicator, run::with_call(sign, kernel_args, info),
                                             kind);
  }
  // In a capture, unless memory is the caller's, who keeps it as long as the graph.
  bool takes_memory_apart(const Place& place) const { return options.memory == nullptr && device::is_captured(place); }
  // `source`: what the args' K and V, which are shapes alone, are made of; null: they are given.
  void attend_steps(const Kernel& kernel, const run::StepList& steps, const ExecutorForwardArgs& args,
                    const run::SourceCall* source = nullptr);
  void attend_steps_backward(const Kernel& kernel, const run::StepList& steps, const ExecutorBackwardArgs& args,
                             const run::Kv& own, const run::SourceCall* source = nullptr);
  // The same for each head group of the schedule's swap.
  void attend_groups(const Kernel& kernel, const ExecutorForwardArgs& args, const TensorView& max_logit);
  void attend_groups_backward(const Kernel& kernel, const ExecutorBackwardArgs& args, const run::Kv& own);
  const run::SourceMoves& source_moves();  // made by the first call with a source

  Schedule schedule;
  ExecutorOptions options;
  std::unique_ptr<run::Agreement> agreement;  // if checked; `context` is then one of its communicator
  detail::CallSign sign;                      // of the schedule and the options; of no use if checked
  run::ExecutionContext context;
  Communicator* communicator;
  run::Workspace workspace;
  run::InUse in_use;
  std::shared_ptr<const run::SourceMoves> moves_of_source;
  std::chrono::steady_clock::time_point began;  // the pass, after what its ranks compared
};

namespace run {

// Checks of arguments against the schedule, before anything moves.
void check_forward(const Schedule& schedule, const ExecutorForwardArgs& args);
void check_backward(const Schedule& schedule, const ExecutorBackwardArgs& args);

// Tells the observer how long each part of a step took. Does nothing without an observer.
class Log {
 public:
  using Clock = std::chrono::steady_clock;

  // `total`: steps of the whole schedule.
  Log(const ExecutorOptions& options, Pass pass, const StepList& steps, Index total, Clock::time_point began)
      : observer_(options.observer), pass_(pass), steps_(steps), total_(total), start_(began) {}

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
            .step = steps_.first() + step,
            .steps = total_,
            .slices = static_cast<Index>(steps_.slices(step).size()),
            .begin = begin,
            .end = begin}};
    return what();
  }

 private:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  const std::function<void(const StepEvent&)>& observer_;
  Pass pass_;
  const StepList& steps_;
  Index total_;
  Clock::time_point start_;
};

// The attention of a call for the heads of one step.
struct StepHeads {
  Attention attention;
  std::vector<Index> map;  // attention.head_map refers to it
};
StepHeads heads_of_step(const Attention& attention, Range heads_q, Range heads_k);

std::span<const Slice> slices_of(const Schedule& schedule, const Step& step);
// Of the step, among those that a call is given; null: none are given, and the step's slices count.
DevicePlan* device_plan(std::span<DevicePlan* const> plans, const Step& step);
// Gives a kernel call the slices of step n, on the host or on the device.
template <class Call>
void set_slices(Call& call, const StepList& steps, Index n, std::span<DevicePlan* const> plans) {
  call.device_plan = device_plan(plans, steps[n]);
  if (call.device_plan == nullptr) call.slices = steps.slices(n);
}

// Ranges of query rows that slices of any step hold, cut where no slice crosses, and of each the last kernel call that
// has slices for it: rows and ends of QuerySteps.
struct RowsOfSteps {
  std::vector<Range> rows;
  std::vector<Index> ends;
};
RowsOfSteps rows_of_steps(const StepList& steps);

// Which steps call the kernel: those with slices and query heads.
class Computed {
 public:
  explicit Computed(const StepList& steps);

  bool operator()(Index step) const { return steps_[at(step)]; }
  Index last() const { return last_; }  // the last such step; -1: none
  // No query head is in two of them, so results need no merging.
  bool once() const { return once_; }
  // Heads of the tensors at hand that see nothing in any step.
  struct Heads {
    Range q, k;
  };
  const std::vector<Heads>& blind() const { return blind_; }

 private:
  std::vector<bool> steps_;
  Index last_ = -1;
  bool once_ = true;
  std::vector<Heads> blind_;
};

}  // namespace run
}  // namespace weft
