#include <cmath>

#include "kernel/convert.h"
#include "kernel/reference/inputs.h"
#include "kernel/registry.h"
#include "run/check.h"
#include "run/fingerprint.h"
#include "run/gradient_return.h"
#include "run/key_feed.h"
#include "run/parts.h"
#include "run/rows.h"

namespace weft {
namespace {

using run::ConstKv;
using run::Kv;
using run::Slot;

// Rows that see a key in some step: the others are never read.
std::vector<bool> rows_with_keys(const Schedule& schedule) {
  std::vector<bool> seen(static_cast<std::size_t>(schedule.q_rows), false);
  for (const Plan& plan : schedule.plans)
    for (const Slice& s : plan.slices) std::fill(seen.begin() + s.q_begin, seen.begin() + s.q_end, true);
  return seen;
}

// The sink takes a share of each whole row, so its gradient comes from finished rows, once, not from steps.
std::vector<double> sink_gradient(const Schedule& schedule, const BackwardArgs& args) {
  std::vector<double> gradient(static_cast<std::size_t>(args.q.heads), 0.0);
  std::vector<double> out(static_cast<std::size_t>(args.v.dim)), dout(out);
  const std::vector<bool> seen = rows_with_keys(schedule);
  for (Index row = 0; row < args.q.rows; ++row) {
    if (!seen[static_cast<std::size_t>(row)]) continue;
    for (Index head = 0; head < args.q.heads; ++head) {
      load_row(args.out, row, head, out.data());
      load_row(args.dout, row, head, dout.data());
      const double share =
          std::exp(reference::sink_logit(args.attention.sink, head) - load_one(args.lse, row, head));
      gradient[static_cast<std::size_t>(head)] -= share * reference::dot(out.data(), dout.data(), args.v.dim);
    }
  }
  return gradient;
}

// dQ over the steps: written by the kernel where a head is in one step, summed in f32 otherwise.
class QueryGradient {
 public:
  QueryGradient(const Schedule& schedule, run::Workspace& workspace, const TensorView& dq)
      : once_(schedule.heads_once()), workspace_(workspace), dq_(dq), sum_(dq) {
    if (!once_ && dq.dtype != DType::f32) sum_ = buffer(Slot::sums);
  }

  TensorView begin(const Step& step) {
    if (once_) return head_range(dq_, step.heads_q.begin, step.heads_q.size());
    part_ = first_ ? sum_ : buffer(Slot::step_dq);
    return part_;
  }
  void end() {
    if (!once_ && !first_) run::add(sum_, part_);
    first_ = false;
  }
  void finish() {
    if (once_) return;
    if (first_) run::clear(sum_);  // no step had slices
    if (sum_.data != dq_.data) run::round_to(dq_, sum_);
  }

 private:
  TensorView buffer(Slot slot) {
    return thd(workspace_.bytes(slot, dq_.rows * dq_.heads * dq_.dim * size_of(DType::f32)), DType::f32, dq_.rows,
               dq_.heads, dq_.dim);
  }

  bool once_, first_ = true;
  run::Workspace& workspace_;
  TensorView dq_, sum_, part_;
};

// f32 sums of the own dK and dV: in the outputs themselves if they are f32.
Kv own_sums(run::Workspace& workspace, const BackwardArgs& args) {
  const Kv buffer = run::take_kv(workspace, Slot::own_key_gradients,
                                 {.rows = args.k.rows,
                                  .heads = args.k.heads,
                                  .dim_qk = args.dk.dtype == DType::f32 ? 0 : args.k.dim,
                                  .dim_v = args.dv.dtype == DType::f32 ? 0 : args.v.dim,
                                  .dtype = DType::f32});
  return {args.dk.dtype == DType::f32 ? args.dk : buffer.k, args.dv.dtype == DType::f32 ? args.dv : buffer.v};
}

}  // namespace

void Executor::backward(const BackwardArgs& args) {
  const Schedule& schedule = parts_->schedule;
  run::check_backward(schedule, args);
  const Kernel& kernel =
      select_kernel(parts_->options.kernel, {Pass::backward, args.q.dtype, args.q.dim, args.v.dim, false});
  Communicator& communicator = *parts_->communicator;
  run::Workspace& workspace = parts_->workspace;

  if (parts_->options.checked) run::compare(communicator, run::fingerprints(args));
  run::Log log(parts_->options, Pass::backward, schedule);
  const Kv own = own_sums(workspace, args);
  QueryGradient dq(schedule, workspace, args.dq);
  run::KeyFeed keys(schedule, communicator, workspace, {args.k, args.v});
  run::GradientReturn home(schedule, communicator, workspace, own);
  for (Index n = 0; n < static_cast<Index>(schedule.steps.size()); ++n) {
    const Step& step = schedule.steps[static_cast<std::size_t>(n)];
    const ConstKv kv = log(StepEvent::Kind::wait, n, [&] { return keys.take(n); });
    const std::span<const Slice> slices = run::slices_of(schedule, step);
    const bool nothing = slices.empty() || step.heads_q.size() == 0;
    const Kv to = log(StepEvent::Kind::give_back, n, [&] { return home.begin(n, nothing); });
    if (!nothing || schedule.heads_once()) {
      const auto mine = [&](const auto& view) { return head_range(view, step.heads_q.begin, step.heads_q.size()); };
      const run::StepHeads heads = run::heads_of_step(args.attention, step);
      const TensorView dq_part = dq.begin(step);
      if (nothing) {
        run::clear(dq_part);
      } else {
        const BackwardArgs part{.q = mine(args.q),
                                .k = kv.k,
                                .v = kv.v,
                                .slices = slices,
                                .attention = heads.attention,
                                .dout = mine(args.dout),
                                .out = mine(args.out),
                                .lse = mine(args.lse),
                                .dq = dq_part,
                                .dk = to.k,
                                .dv = to.v};
        log(StepEvent::Kind::compute, n, [&] { kernel.backward(part); });
      }
      dq.end();
    }
    log(StepEvent::Kind::give_back, n, [&] { home.end(n); });
  }
  home.finish();
  dq.finish();
  if (own.k.data != args.dk.data) run::round_to(args.dk, own.k);
  if (own.v.data != args.dv.data) run::round_to(args.dv, own.v);
  if (args.dsink.given()) {
    std::vector<double> dsink = sink_gradient(schedule, args);
    run::reduce_into(communicator, dsink, Reduce::sum, args.dsink);
  }
  // Nobody is done before everybody is: an error anywhere is one everywhere.
  if (parts_->options.checked) run::meet(communicator);
}

}  // namespace weft
