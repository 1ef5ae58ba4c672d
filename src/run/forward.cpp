#include "comm/flight.h"
#include "index.h"
#include "kernel/check_args.h"
#include "run/executor_data.h"
#include "run/head_numbers.h"
#include "run/kernel_args.h"
#include "run/query_moves.h"
#include "run/source.h"
#include "run/swap.h"

namespace weft {
namespace {

using run::ConstKv;
using run::Slot;

template <class T>
RowState<T>* take_states(run::Workspace& workspace, Index count) {
  return static_cast<RowState<T>*>(workspace.bytes(Slot::states, count * static_cast<Index>(sizeof(RowState<T>))));
}

// Empty states of so many rows, in f32 or, of f64 inputs, in f64.
PartialView empty_states(run::Workspace& workspace, const ExecutorForwardArgs& args, Index rows) {
  const Index heads = args.q.heads, dim = args.v.dim;
  const DType type = sum_type(args.q.dtype);
  PartialView partial{.sums =
                          thd(workspace.bytes(Slot::sums, rows * heads * dim * size_of(type)), type, rows, heads, dim)};
  if (type == DType::f64) {  // on the CPU: no GPU kernel takes f64
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

// A call for the heads of one step, without slices yet; outputs are the call's own.
KernelForwardArgs call_of_step(const ExecutorForwardArgs& args, Range heads_q, const run::StepHeads& heads,
                               const ConstKv& kv) {
  const auto mine = [&](TensorView view) {
    if (view.given()) return run::some_heads(view, heads_q);
    if (view.heads > 0) view.heads = heads_q.size();  // without rows, but not left out
    return view;
  };
  KernelForwardArgs call = run::forward_call(args, kv);
  call.q = run::some_heads(args.q, heads_q);
  call.attention = heads.attention;
  call.out = mine(args.out);
  call.lse = mine(args.lse);
  call.max_logit = mine(args.max_logit);
  return call;
}

}  // namespace

// All steps, on tensors whose heads are the steps' heads.
void Executor::Data::attend_steps(const Kernel& kernel, const run::StepList& steps, const ExecutorForwardArgs& args,
                                  const run::SourceCall* source) {
  const run::Computed computed(steps);
  const bool shared = !schedule.query_moves.empty();  // other ranks have results of the own queries
  const bool once = computed.once() && !shared;
  const ConstKv own_kv{args.k, args.v};
  const bool summed = !once && !shared && args.device_plans.empty() && kernel.takes_steps != nullptr &&
                      kernel.takes_steps(run::forward_call(args, own_kv));
  const run::RowsOfSteps held = summed ? run::rows_of_steps(steps) : run::RowsOfSteps{};
  QuerySteps query_steps{.rows = held.rows, .ends = held.ends};
  const Index rows = shared ? schedule.query_rows() : args.q.rows;
  const PartialView partial = once || summed ? PartialView{} : empty_states(workspace, args, rows);
  std::optional<run::ForwardQueries> queries;
  if (shared) queries.emplace(schedule, *communicator, workspace, args, partial);

  run::Log log(options, Pass::forward, steps, static_cast<Index>(schedule.steps.size()), began);
  run::StepKeys keys(steps, *communicator, workspace, own_kv, source);
  for (Index n = 0; n < steps.size(); ++n) {
    const ConstKv kv = log(StepEvent::Kind::wait, n, [&] {
      if (queries) queries->before_keys(n);
      const ConstKv arrived = keys.take(n);
      if (queries) queries->after_keys(n);
      return arrived;
    });
    if (!computed(n)) {
      if (queries) queries->end(n);
      continue;
    }
    const run::StepHeads heads = run::heads_of_step(args.attention, steps.heads_q(n), steps.heads_k(n));
    KernelForwardArgs call = call_of_step(args, steps.heads_q(n), heads, kv);
    run::set_slices(call, steps, n, args.device_plans);
    query_steps.last = n == computed.last();
    if (summed) call.steps = &query_steps;
    if (!once && !summed) {
      call.q = queries ? queries->q(n) : args.q;
      call.out = call.lse = call.max_logit = {};
      call.partial = queries ? queries->states(n) : partial;
    }
    log(StepEvent::Kind::compute, n, [&] {
      if (source != nullptr) {
        std::tie(call.k, call.v) = source->expand(n, kv.k).both();
        call.slices = source->slices(n);
      }
      kernel.forward(call);
    });
    if (queries) queries->end(n);
  }
  if (summed) return;
  if (!once) {
    KernelForwardArgs whole = run::forward_call(args, own_kv);
    whole.partial = queries ? queries->finish() : partial;
    return finish_partial(finish_args(whole));
  }
  for (const run::Computed::Heads& blind : computed.blind()) {
    // No slices: the kernel writes what rows without keys have.
    const run::StepHeads heads = run::heads_of_step(args.attention, blind.q, blind.k);
    kernel.forward(call_of_step(args, blind.q, heads, run::heads_of(own_kv, blind.k)));
  }
}

// Each head group once the swap has brought it.
void Executor::Data::attend_groups(const Kernel& kernel, const ExecutorForwardArgs& args, const TensorView& max_logit) {
  ExecutorForwardArgs moved = args;
  if (args.source != nullptr) std::tie(moved.k, moved.v) = run::as_keys(args.source->rows).both();
  const Schedule& moves = args.source != nullptr ? source_moves().schedule : schedule;
  run::ForwardSwap swap(moves, schedule, *communicator, workspace, moved);
  for (Index n = 0; n < swap.head_groups(); ++n) {
    ExecutorForwardArgs part = swap.bring(n);
    if (max_logit.given()) part.max_logit = run::some_heads(max_logit, swap.heads_q(n));
    if (args.source == nullptr) {
      attend_steps(kernel, {schedule, n}, part);
    } else {
      const run::SourceCall source = run::source_of(source_moves(), schedule, args, n, part.k);
      std::tie(part.k, part.v) = source.shapes().both();
      attend_steps(kernel, {schedule, n}, part, &source);
    }
    swap.give_back(n);
  }
  swap.finish();
}

void Executor::forward(const ExecutorForwardArgs& args) {
  const run::InUse::Call guard(data_->in_use, "executor");
  const detail::PassLabel label("forward");
  ExecutorForwardArgs inner = run::with_keys(data_->schedule, args);
  run::check_forward(data_->schedule, inner);
  // Checked ranks wait for the GPU, which a capture does not allow.
  data_->context.use(args.place, "executor", !args.device_plans.empty() && !data_->agreement);
  const run::Workspace::Apart apart(data_->workspace, data_->takes_memory_apart(args.place));
  Communicator& communicator = *data_->communicator;
  const std::unique_ptr<run::Agreement>& agreement = data_->agreement;
  const run::CollectiveCall call{run::CallKind::forward, args.layer};
  const KernelForwardArgs whole = run::forward_call(inner, {inner.k, inner.v});
  std::uint64_t number = 0;
  if (agreement) {
    std::vector<run::Fingerprint> what = run::fingerprints(whole, data_->options.kernel);
    what.push_back(run::fingerprint(args.source));
    number = agreement->compare(call, what);
  }
  const Kernel kernel = data_->kernel_for(request_of(Pass::forward, inner), !args.device_plans.empty());
  const auto pass = data_->begin_pass(whole, args.layer, args.source, detail::PassKind::forward);
  std::optional<run::HeadNumbers> largest;
  if (args.max_logit.given())
    largest.emplace(args.place, data_->workspace, args.q.heads, communicator.ranks(), kMinusInfinity<double>);
  data_->began = std::chrono::steady_clock::now();
  // By the heads of the whole problem, so that a row's bits do not depend on how heads are distributed.
  if (args.keys_per_split == 0) inner.keys_per_split = default_keys_per_split(args.q.heads);
  const TensorView max_logit = args.max_logit.given() ? largest->view() : TensorView{};
  if (data_->schedule.swap) {
    data_->attend_groups(kernel, inner, max_logit);
  } else {
    if (args.max_logit.given()) inner.max_logit = max_logit;
    if (args.source == nullptr) {
      data_->attend_steps(kernel, data_->schedule, inner);
    } else {
      const run::SourceCall source = run::source_of(data_->source_moves(), data_->schedule, inner);
      data_->attend_steps(kernel, data_->schedule, inner, &source);
    }
  }
  if (args.max_logit.given()) largest->reduce_into(communicator, Reduce::max, args.max_logit);
  // No rank returns before all are done, so that an error on one is an error on all.
  if (agreement) agreement->end(call, number, args.out, args.lse, args.place);
}

}  // namespace weft
