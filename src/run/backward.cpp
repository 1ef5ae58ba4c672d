#include <cmath>

#include "index.h"
#include "kernel/convert.h"
#include "kernel/inputs.h"
#include "kernel/registry.h"
#include "run/check.h"
#include "run/executor_data.h"
#include "run/gradient_return.h"
#include "run/head_numbers.h"
#include "run/key_feed.h"
#include "run/rows.h"
#include "run/swap.h"

namespace weft {
namespace {

using run::ConstKv;
using run::Kv;
using run::Slot;

// The rank's own rows that see a key in some step: the others are never read.
std::vector<bool> rows_with_keys(const Schedule& schedule) {
  std::vector<bool> seen(at(schedule.q_rows * schedule.ulysses()), false);
  for (const Plan& plan : schedule.plans)
    for (const Slice& s : plan.slices) std::fill(seen.begin() + s.q_begin, seen.begin() + s.q_end, true);
  const Index first = schedule.swap ? (schedule.rank - schedule.swap->group.begin) * schedule.q_rows : 0;
  return {seen.begin() + first, seen.begin() + first + schedule.q_rows};
}

// The sink takes a share of each whole row, so its gradient comes from finished rows, once, not from steps.
void sink_gradient(const Schedule& schedule, const BackwardArgs& args, double* gradient) {
  std::vector<double> out(at(args.v.dim)), dout(out);
  const std::vector<bool> seen = rows_with_keys(schedule);
  for (Index row = 0; row < args.q.rows; ++row) {
    if (!seen[at(row)]) continue;
    for (Index head = 0; head < args.q.heads; ++head) {
      load_row(args.out, row, head, out.data());
      load_row(args.dout, row, head, dout.data());
      const double share = std::exp(reference::sink_logit(args.attention.sink, head) - load_one(args.lse, row, head));
      gradient[head] -= share * reference::dot(out.data(), dout.data(), args.v.dim);
    }
  }
}

// dQ over the steps: written by the kernel where a head is in one step or the kernel sums up itself, summed in `type`
// otherwise.
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

  TensorView begin(const Step& step) {
    if (once_) return run::some_heads(dq_, step.heads_q);
    part_ = first_ ? sum_ : buffer(Slot::step_dq);
    return part_;
  }
  void end() {
    if (!once_ && !first_) run::add(place_, sum_, part_);
    first_ = false;
  }
  void finish() {
    for (const Step& step : computed_.blind()) run::clear(place_, run::some_heads(dq_, step.heads_q));
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

// Sums of the own dK and dV, in f32 or of f64 inputs in f64: in the outputs themselves if they have that type.
Kv own_sums(run::Workspace& workspace, const Schedule& schedule, const BackwardArgs& args) {
  const bool shares = run::keys_share(schedule);
  const DType type = sum_type(args.q.dtype);
  if (shares)  // as large as the keys need it, before anybody points to it
    run::take_kv(workspace, Slot::keys_0,
                 {.rows = schedule.steps.front().key_rows,
                  .heads = schedule.steps.front().heads_k.size(),
                  .dim_qk = args.k.dim,
                  .dim_v = args.v.dim,
                  .dtype = args.k.dtype});
  const Kv buffer = run::take_kv(workspace, shares ? Slot::keys_0 : Slot::own_key_gradients,
                                 {.rows = args.k.rows,
                                  .heads = args.k.heads,
                                  .dim_qk = args.dk.dtype == type ? 0 : args.k.dim,
                                  .dim_v = args.dv.dtype == type ? 0 : args.v.dim,
                                  .dtype = type});
  return {args.dk.dtype == type ? args.dk : buffer.k, args.dv.dtype == type ? args.dv : buffer.v};
}

}  // namespace

// All steps, on tensors whose heads are the steps' heads; dK and dV end as sums in `own`.
void Executor::Parts::attend_steps_backward(const Kernel& kernel, const BackwardArgs& args, const Kv& own) {
  const run::Computed computed(schedule);
  run::Log log(options, Pass::backward, schedule);
  BackwardArgs asked = args;
  asked.deterministic = options.deterministic;
  const bool summed = !computed.once() && kernel.takes_steps_backward != nullptr && kernel.takes_steps_backward(asked);
  const std::vector<Range> rows = summed ? run::rows_of_steps(schedule).rows : std::vector<Range>{};
  QuerySteps query_steps{.rows = rows};
  QueryGradient dq(computed, summed, workspace, args.place, args.dq, sum_type(args.q.dtype));
  run::KeyFeed keys(schedule, *communicator, workspace, {args.k, args.v});
  run::GradientReturn home(schedule, *communicator, workspace, args.place, own);
  for (Index n = 0; n < static_cast<Index>(schedule.steps.size()); ++n) {
    const Step& step = schedule.steps[at(n)];
    const ConstKv kv = log(StepEvent::Kind::wait, n, [&] { return keys.take(n); });
    const Kv to = log(StepEvent::Kind::give_back, n, [&] { return home.begin(n, !computed(n)); });
    if (computed(n)) {
      const auto mine = [&](const ConstTensorView& view) { return run::some_heads(view, step.heads_q); };
      const run::StepHeads heads = run::heads_of_step(args.attention, step);
      const BackwardArgs part{.q = mine(args.q),
                              .k = kv.k,
                              .v = kv.v,
                              .slices = run::slices_of(schedule, step),
                              .attention = heads.attention,
                              .dout = mine(args.dout),
                              .out = mine(args.out),
                              .lse = mine(args.lse),
                              .dq = dq.begin(step),
                              .dk = to.k,
                              .dv = to.v,
                              .place = args.place,
                              .deterministic = options.deterministic,
                              .steps = summed ? &query_steps : nullptr};
      query_steps.last = n == computed.last();
      log(StepEvent::Kind::compute, n, [&] { kernel.backward(part); });
      dq.end();
    }
    log(StepEvent::Kind::give_back, n, [&] { home.end(n); });
  }
  home.finish();
  dq.finish();
}

void Executor::backward(const BackwardArgs& args) {
  const run::InUse::Call guard(parts_->in_use, "executor");
  const Schedule& schedule = parts_->schedule;
  run::check_backward(schedule, args);
  parts_->seat.use(args.place, "executor");
  Communicator& communicator = *parts_->communicator;
  const std::unique_ptr<run::Agreement>& agreement = parts_->agreement;
  const run::CollectiveCall call{run::CallKind::backward, args.layer};
  if (agreement)
    agreement->compare(call, run::fingerprints(args, parts_->options.kernel),
                       agreement->forwards_of(args.out, args.lse));
  const Kernel kernel = parts_->kernel_for(Pass::backward, args.q, args.v, args.place);
  const Kv own = own_sums(parts_->workspace, schedule, args);
  if (schedule.swap) {
    run::HeadSwap swap(schedule, communicator, parts_->workspace);
    const BackwardArgs inner = swap.bring(args);
    parts_->attend_steps_backward(kernel, inner, {inner.dk, inner.dv});
    swap.give_back(inner, args, own);
  } else {
    parts_->attend_steps_backward(kernel, args, own);
  }
  run::round_to(args.place, {args.dk, args.dv}, run::constant(own));
  if (args.dsink.given()) {
    run::HeadNumbers dsink(args.place, parts_->workspace, args.q.heads, communicator.ranks(), 0);
    if (args.place.kind == DeviceKind::cpu)
      sink_gradient(schedule, args, dsink.view().at<double>(0, 0));
    else
      device::sink_gradient(args.place, args, dsink.view().at<double>(0, 0));
    dsink.reduce_into(communicator, Reduce::sum, args.dsink);
  }
  // Nobody is done before everybody is: an error anywhere is one everywhere.
  if (agreement) agreement->end(call);
}

}  // namespace weft
