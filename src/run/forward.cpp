#include "kernel/convert.h"
#include "kernel/registry.h"
#include "run/check.h"
#include "run/fingerprint.h"
#include "run/key_feed.h"
#include "run/parts.h"

namespace weft {
namespace {

using run::ConstKv;
using run::Slot;

// f32 states of all rows, none of which has seen a key.
PartialView empty_states(run::Workspace& workspace, const ForwardArgs& args) {
  const Index rows = args.q.rows, heads = args.q.heads, dim = args.v.dim;
  auto* sums = workspace.bytes(Slot::sums, rows * heads * dim * size_of(DType::f32));
  auto* states = static_cast<RowState<float>*>(
      workspace.bytes(Slot::states, rows * heads * static_cast<Index>(sizeof(RowState<float>))));
  std::uninitialized_fill_n(states, rows * heads, RowState<float>{});
  return {thd(sums, DType::f32, rows, heads, dim), states};
}

}  // namespace

void Executor::forward(const ForwardArgs& args) {
  const Schedule& schedule = parts_->schedule;
  run::check_forward(schedule, args);
  const bool once = schedule.heads_once();
  const Kernel& kernel =
      select_kernel(parts_->options.kernel, {Pass::forward, args.q.dtype, args.q.dim, args.v.dim, !once});
  Communicator& communicator = *parts_->communicator;

  std::vector<double> max_logit(static_cast<std::size_t>(args.q.heads));
  ForwardArgs whole = args;
  if (args.max_logit.given()) whole.max_logit = per_head(max_logit.data(), DType::f64, args.q.heads);
  if (!once) whole.partial = empty_states(parts_->workspace, args);

  if (parts_->options.checked) run::compare(communicator, run::fingerprints(args));
  run::Log log(parts_->options, Pass::forward, schedule);
  run::KeyFeed keys(schedule, communicator, parts_->workspace, {args.k, args.v});
  for (Index n = 0; n < static_cast<Index>(schedule.steps.size()); ++n) {
    const Step& step = schedule.steps[static_cast<std::size_t>(n)];
    const ConstKv kv = log(StepEvent::Kind::wait, n, [&] { return keys.take(n); });
    const std::span<const Slice> slices = run::slices_of(schedule, step);
    const run::StepHeads heads = run::heads_of_step(args.attention, step);
    ForwardArgs part{.q = args.q, .k = kv.k, .v = kv.v, .slices = slices, .attention = heads.attention};
    if (once) {
      const auto mine = [&](const TensorView& view) {
        return view.given() ? head_range(view, step.heads_q.begin, step.heads_q.size()) : view;
      };
      part.q = head_range(args.q, step.heads_q.begin, step.heads_q.size());
      part.out = mine(args.out);
      part.lse = mine(args.lse);
      part.max_logit = mine(whole.max_logit);
    } else {
      part.partial = whole.partial;
    }
    const bool nothing = step.heads_q.size() == 0 || (!once && slices.empty());
    if (!nothing) log(StepEvent::Kind::compute, n, [&] { kernel.forward(part); });
  }
  if (!once) finish_partial(whole);
  if (args.max_logit.given()) run::reduce_into(communicator, max_logit, Reduce::max, args.max_logit);
  // Nobody is done before everybody is: an error anywhere is one everywhere.
  if (parts_->options.checked) run::meet(communicator);
}

}  // namespace weft
