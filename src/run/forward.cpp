#include "index.h"
#include "kernel/registry.h"
#include "run/check.h"
#include "run/executor_data.h"
#include "run/head_numbers.h"
#include "run/key_feed.h"
#include "run/swap.h"

namespace weft {
namespace {

using run::ConstKv;
using run::Slot;

template <class T>
RowState<T>* take_states(run::Workspace& workspace, Index count) {
  return static_cast<RowState<T>*>(workspace.bytes(Slot::states, count * static_cast<Index>(sizeof(RowState<T>))));
}

// States of all rows, none of which has seen a key; f32, of f64 inputs f64.
PartialView empty_states(run::Workspace& workspace, const ForwardArgs& args) {
  const Index rows = args.q.rows, heads = args.q.heads, dim = args.v.dim;
  const DType type = sum_type(args.q.dtype);
  PartialView partial{.sums =
                          thd(workspace.bytes(Slot::sums, rows * heads * dim * size_of(type)), type, rows, heads, dim)};
  if (type == DType::f64) {  // on CPUs only: no kernel of a GPU takes it
    partial.states_f64 = take_states<double>(workspace, rows * heads);
    std::uninitialized_fill_n(partial.states_f64, rows * heads, RowState<double>{});
    return partial;
  }
  partial.states = take_states<float>(workspace, rows * heads);
  if (args.place.kind == DeviceKind::cpu)
    std::uninitialized_fill_n(partial.states, rows * heads, RowState<float>{});
  else
    device::fill(args.place, partial.states, rows * heads);
  return partial;
}

// The part of a call's outputs that some heads are.
ForwardArgs of_heads(const ForwardArgs& args, Range heads) {
  const auto mine = [&](TensorView view) {
    if (view.given()) return run::some_heads(view, heads);
    if (view.heads > 0) view.heads = heads.size();  // of no rows, which is not the same as left out
    return view;
  };
  return {.q = run::some_heads(args.q, heads),
          .k = args.k,
          .v = args.v,
          .out = mine(args.out),
          .lse = mine(args.lse),
          .max_logit = mine(args.max_logit),
          .part_keys = args.part_keys,
          .place = args.place};
}

}  // namespace

// All steps, on tensors whose heads are the steps' heads.
void Executor::Parts::attend_steps(const Kernel& kernel, const ForwardArgs& args) {
  const run::Computed computed(schedule);
  const bool once = computed.once();
  ForwardArgs whole = args;
  const bool summed = !once && kernel.takes_steps != nullptr && kernel.takes_steps(args);
  const run::RowsOfSteps held = summed ? run::rows_of_steps(schedule) : run::RowsOfSteps{};
  QuerySteps query_steps{.rows = held.rows, .ends = held.ends};
  if (!once && !summed) whole.partial = empty_states(workspace, args);

  run::Log log(options, Pass::forward, schedule);
  run::KeyFeed keys(schedule, *communicator, workspace, {args.k, args.v});
  for (Index n = 0; n < static_cast<Index>(schedule.steps.size()); ++n) {
    const Step& step = schedule.steps[at(n)];
    const ConstKv kv = log(StepEvent::Kind::wait, n, [&] { return keys.take(n); });
    if (!computed(n)) continue;
    const run::StepHeads heads = run::heads_of_step(args.attention, step);
    ForwardArgs part = once || summed ? of_heads(args, step.heads_q)
                                      : ForwardArgs{.q = args.q, .partial = whole.partial, .place = args.place};
    if (summed) part.steps = &query_steps;
    query_steps.last = n == computed.last();
    part.k = kv.k;
    part.v = kv.v;
    part.slices = run::slices_of(schedule, step);
    part.attention = heads.attention;
    log(StepEvent::Kind::compute, n, [&] { kernel.forward(part); });
  }
  if (summed) return;
  if (!once) return finish_partial(whole);
  for (const Step& step : computed.blind()) {  // nothing to see: the kernel knows what that gives
    const run::StepHeads heads = run::heads_of_step(args.attention, step);
    const ConstKv own = run::heads_of(ConstKv{args.k, args.v}, step.heads_k);
    ForwardArgs part = of_heads(args, step.heads_q);
    part.k = own.k;
    part.v = own.v;
    part.attention = heads.attention;
    kernel.forward(part);
  }
}

void Executor::forward(const ForwardArgs& args) {
  const run::InUse::Call guard(parts_->in_use, "executor");
  run::check_forward(parts_->schedule, args);
  parts_->seat.use(args.place, "executor");
  Communicator& communicator = *parts_->communicator;
  const std::unique_ptr<run::Agreement>& agreement = parts_->agreement;
  const run::CollectiveCall call{run::CallKind::forward, args.layer};
  const std::uint64_t number =
      agreement ? agreement->compare(call, run::fingerprints(args, parts_->options.kernel)) : 0;
  const Kernel kernel = parts_->kernel_for(Pass::forward, args.q, args.v, args.place);
  std::optional<run::HeadNumbers> largest;
  if (args.max_logit.given())
    largest.emplace(args.place, parts_->workspace, args.q.heads, communicator.ranks(), kMinusInfinity<double>);
  ForwardArgs inner = args;
  // By the heads of all calls, so that a row's bits do not depend on how heads are shared out.
  if (args.part_keys == 0) inner.part_keys = part_keys_of(args.q.heads);
  if (parts_->schedule.swap) {
    run::HeadSwap swap(parts_->schedule, communicator, parts_->workspace);
    inner = swap.bring(inner);
    if (args.max_logit.given()) inner.max_logit = run::some_heads(largest->view(), swap.heads_q());
    parts_->attend_steps(kernel, inner);
    swap.give_back(inner, args);
  } else {
    if (args.max_logit.given()) inner.max_logit = largest->view();
    parts_->attend_steps(kernel, inner);
  }
  if (args.max_logit.given()) largest->reduce_into(communicator, Reduce::max, args.max_logit);
  // Nobody is done before everybody is: an error anywhere is one everywhere.
  if (agreement) agreement->end(call, number, args.out, args.lse);
}

}  // namespace weft
