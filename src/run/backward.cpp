#include "comm/flight.h"
#include "index.h"
#include "kernel/sink_gradient.h"
#include "run/executor_data.h"
#include "run/gradient_return.h"
#include "run/head_numbers.h"
#include "run/kernel_args.h"
#include "run/query_moves.h"
#include "run/rows.h"
#include "run/source.h"
#include "run/swap.h"

namespace weft {
namespace {

using run::ConstKv;
using run::Kv;
using run::Slot;

// The rank's own rows that a slice of some step holds, on whichever rank.
std::vector<Range> own_rows_in_slices(const Schedule& schedule) {
  if (!schedule.query_moves.empty()) return schedule.seeing;
  const Index first = schedule.swap ? (schedule.rank - schedule.swap->group.begin) * schedule.q_rows : 0;
  std::vector<Range> own;
  for (const Range& r : run::rows_of_steps(schedule).rows)
    own.push_back({max_of(r.begin - first, 0), min_of(r.end - first, schedule.q_rows)});
  return own;
}

// dQ over the steps. The kernel writes it where each head is in one step only, or where the kernel itself accumulates
// over calls (QuerySteps); otherwise the dQ of each step is added up here, in `type`.
class QueryGradient {
 public:
  QueryGradient(const run::Computed& computed, bool by_kernel, run::Workspace& workspace, const Place& place,
                const TensorView& dq, DType type)
      : computed_(computed),
        once_(computed.once() || by_kernel),
        workspace_(workspace),
        place_(place),
        type_(type),
        dq_(dq),
        sum_(dq) {
    if (!once_ && dq.dtype != type) sum_ = buffer(Slot::sums);
  }

  TensorView begin(Range heads) {
    if (once_) return run::some_heads(dq_, heads);
    part_ = first_ ? sum_ : buffer(Slot::step_dq);
    return part_;
  }
  void end() {
    if (!once_ && !first_) run::add(place_, sum_, part_);
    first_ = false;
  }
  void finish() {
    for (const run::Computed::Heads& blind : computed_.blind()) run::clear(place_, run::some_heads(dq_, blind.q));
    if (!once_ && sum_.data != dq_.data) run::round_to(place_, dq_, sum_);
  }

 private:
  TensorView buffer(Slot slot) {
    return thd(workspace_.bytes(slot, dq_.rows * dq_.heads * dq_.dim * size_of(type_)), type_, dq_.rows, dq_.heads,
               dq_.dim);
  }

  const run::Computed& computed_;
  bool once_, first_ = true;
  run::Workspace& workspace_;
  Place place_;
  DType type_;
  TensorView dq_, sum_, part_;
};

// Where the dK and dV of the rank's own rows are summed, in f32 or, of f64 inputs, in f64: the outputs themselves if
// they have that type.
Kv own_sums(run::Workspace& workspace, const Schedule& schedule, const ExecutorBackwardArgs& args) {
  const bool shared = run::keys_share(schedule);
  const DType type = sum_type(args.q.dtype);
  if (shared)  // grows the slot to the size of the keys before anything points into it
    run::take_kv(
        workspace, Slot::keys_0,
        shape_like(ConstKv{args.k, args.v}, schedule.steps.front().key_rows, schedule.steps.front().heads_k.size()));
  const Kv buffer = run::take_kv(workspace, shared ? Slot::keys_0 : Slot::own_key_gradients,
                                 {.rows = args.k.rows,
                                  .heads = args.k.heads,
                                  .dim_qk = args.dk.dtype == type ? 0 : args.k.dim,
                                  .dim_v = args.dv.dtype == type ? 0 : args.v.dim,
                                  .dtype = type});
  return {args.dk.dtype == type ? args.dk : buffer.k, args.dv.dtype == type ? args.dv : buffer.v};
}

// The same of dsource, which is in the place of dK.
Kv source_sums(run::Workspace& workspace, const ExecutorBackwardArgs& args) {
  const DType type = sum_type(args.q.dtype);
  if (args.dsource.dtype == type) return run::as_keys(args.dsource);
  return run::take_kv(workspace, Slot::own_key_gradients, {args.dsource.rows, 1, args.dsource.dim, 0, type});
}

}  // namespace

// All steps, on tensors whose heads are the steps' heads; dK and dV, or dsource, end as sums in `own`.
void Executor::Data::attend_steps_backward(const Kernel& kernel, const run::StepList& steps,
                                           const ExecutorBackwardArgs& args, const Kv& own,
                                           const run::SourceCall* source) {
  const run::Computed computed(steps);
  run::Log log(options, Pass::backward, steps, static_cast<Index>(schedule.steps.size()), began);
  KernelBackwardArgs whole = run::backward_call(args, {args.k, args.v});
  whole.deterministic = options.deterministic;
  whole.dsink = {};  // made of finished rows, once, not of steps
  std::optional<run::BackwardQueries> queries;
  if (!schedule.query_moves.empty()) queries.emplace(schedule, *communicator, workspace, args);
  const bool summed = !queries && !computed.once() && args.device_plans.empty() &&
                      kernel.takes_steps_backward != nullptr && kernel.takes_steps_backward(whole);
  const std::vector<Range> rows = summed ? run::rows_of_steps(steps).rows : std::vector<Range>{};
  QuerySteps query_steps{.rows = rows};
  QueryGradient dq(computed, summed || queries, workspace, args.place, args.dq, sum_type(args.q.dtype));
  run::StepKeys keys(steps, *communicator, workspace, {args.k, args.v}, source);
  run::KeyGradients home(steps, computed, *communicator, workspace, args.place, own, options.deterministic, source);
  for (Index n = 0; n < steps.size(); ++n) {
    const ConstKv kv = log(StepEvent::Kind::wait, n, [&] {
      if (queries) queries->before_keys(n);
      const ConstKv arrived = keys.take(n);
      if (queries) queries->after_keys(n);
      return arrived;
    });
    const run::StepGradients gradients = log(StepEvent::Kind::give_back, n, [&] { return home.begin(n); });
    if (computed(n)) {
      const Range heads_q = steps.heads_q(n);
      const auto mine = [&](const ConstTensorView& view) { return run::some_heads(view, heads_q); };
      const run::StepHeads heads = run::heads_of_step(args.attention, heads_q, steps.heads_k(n));
      KernelBackwardArgs call = whole;
      call.q = mine(args.q);
      call.k = kv.k;
      call.v = kv.v;
      run::set_slices(call, steps, n, args.device_plans);
      call.attention = heads.attention;
      call.dout = mine(args.dout);
      call.out = mine(args.out);
      call.lse = mine(args.lse);
      if (queries)
        queries->set(call, n);
      else
        call.dq = dq.begin(heads_q);
      call.dk = gradients.to.k;
      call.dv = gradients.to.v;
      call.add_keys = gradients.add;
      if (summed) call.steps = &query_steps;
      query_steps.last = n == computed.last();
      log(StepEvent::Kind::compute, n, [&] {
        if (source != nullptr) {
          std::tie(call.k, call.v) = source->expand(n, kv.k).both();
          call.slices = source->slices(n);
        }
        kernel.backward(call);
        home.reduce(n, kv, gradients.to);
      });
      queries ? queries->computed(n) : dq.end();
    }
    if (queries) queries->end(n);
    log(StepEvent::Kind::give_back, n, [&] { home.end(n); });
  }
  home.finish();
  queries ? queries->finish() : dq.finish();
}

// Each head group once the swap has brought it.
void Executor::Data::attend_groups_backward(const Kernel& kernel, const ExecutorBackwardArgs& args, const Kv& own) {
  ExecutorBackwardArgs moved = args;
  if (args.source != nullptr) std::tie(moved.k, moved.v) = run::as_keys(args.source->rows).both();
  const Schedule& moves = args.source != nullptr ? source_moves().schedule : schedule;
  run::BackwardSwap swap(moves, schedule, *communicator, workspace, moved, own);
  for (Index n = 0; n < swap.head_groups(); ++n) {
    ExecutorBackwardArgs part = swap.bring(n);
    const Kv sums{part.dk, part.dv};
    if (args.source == nullptr) {
      attend_steps_backward(kernel, {schedule, n}, part, sums);
    } else {
      const run::SourceCall source = run::source_of(source_moves(), schedule, args, n, part.k);
      std::tie(part.k, part.v) = source.shapes().both();
      attend_steps_backward(kernel, {schedule, n}, part, sums, &source);
    }
    swap.give_back(n);
  }
  swap.finish();
}

void Executor::backward(const ExecutorBackwardArgs& args) {
  const run::InUse::Call guard(data_->in_use, "executor");
  const detail::PassLabel label("backward");
  const Schedule& schedule = data_->schedule;
  const ExecutorBackwardArgs inner = run::with_keys(schedule, args);
  run::check_backward(schedule, inner);
  // Checked ranks wait for the GPU, which a capture does not allow.
  data_->context.use(args.place, "executor", !args.device_plans.empty() && !data_->agreement);
  const run::Workspace::Apart apart(data_->workspace, data_->takes_memory_apart(args.place));
  Communicator& communicator = *data_->communicator;
  const std::unique_ptr<run::Agreement>& agreement = data_->agreement;
  const run::CollectiveCall call{run::CallKind::backward, args.layer};
  const KernelBackwardArgs whole = run::backward_call(inner, {inner.k, inner.v});
  if (agreement) {
    std::vector<run::Fingerprint> what = run::fingerprints(whole, data_->options.kernel);
    what.push_back(run::fingerprint(args.source));
    agreement->compare(call, what, agreement->forwards_of(args.out, args.lse, args.place));
  }
  const Kernel kernel = data_->kernel_for(request_of(Pass::backward, inner), !args.device_plans.empty());
  const auto pass = data_->begin_pass(whole, args.layer, args.source, detail::PassKind::backward);
  data_->began = std::chrono::steady_clock::now();
  const Kv own =
      args.source != nullptr ? source_sums(data_->workspace, args) : own_sums(data_->workspace, schedule, args);
  if (schedule.swap) {
    data_->attend_groups_backward(kernel, inner, own);
  } else if (args.source == nullptr) {
    data_->attend_steps_backward(kernel, schedule, inner, own);
  } else {
    const run::SourceCall source = run::source_of(data_->source_moves(), schedule, inner);
    data_->attend_steps_backward(kernel, schedule, inner, own, &source);
  }
  if (args.source == nullptr)
    run::round_to(args.place, {args.dk, args.dv}, run::constant(own));
  else if (own.k.data != args.dsource.data)
    run::round_to(args.place, args.dsource, own.k);
  if (args.dsink.given()) {
    run::HeadNumbers dsink(args.place, data_->workspace, args.q.heads, communicator.ranks(), 0);
    sink_gradient(whole, own_rows_in_slices(schedule), dsink.view().at<double>(0, 0));
    dsink.reduce_into(communicator, Reduce::sum, args.dsink);
  }
  if (agreement) agreement->end(call);
}

}  // namespace weft
