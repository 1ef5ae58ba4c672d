#include "weft/executor.h"

#include <algorithm>

#include "index.h"
#include "kernel/check_args.h"
#include "ranges.h"
#include "run/executor_data.h"
#include "run/kernel_args.h"
#include "run/source.h"
#include "text.h"
#include "weft/device_plan.h"
#include "weft/support.h"

namespace weft {

std::string name(const Place& place) { return place.kind == DeviceKind::cpu ? "the CPU" : text("GPU ", place.device); }

namespace run {

ExecutionContext::ExecutionContext(Communicator& ranks, const Place& place, std::pmr::memory_resource* memory)
    : ranks_(ranks), place_(place), memory_(memory) {
  if (place.kind == DeviceKind::cpu) return;
  if (memory == nullptr) own_memory_ = device::make_memory(place);
  on_device_ = ranks.on(place);
}

void ExecutionContext::use(const Place& place, std::string_view what, bool device_plans) const {
  if (place.kind != place_.kind || place.device != place_.device)
    throw Error(text("the tensors lie on ", name(place), ", and the ", what, " was made for ", name(place_)),
                "give its options the place of the tensors");
  if (!device_plans) device::refuse_capture(place, what);
  // Transports with collectives of their own (NCCL's) order all in the stream; with the others the host waits.
  if (device_plans && ranks_.ranks() > 1 && device::is_captured(place) && !communicator().has_collectives())
    throw Error(text("a CUDA graph is captured over ", ranks_.ranks(), " ranks that meet on the host (",
                     communicator().name(), ")"),
                "capture over NCCL, on one rank, or call it outside of the capture");
  if (own_memory_ != nullptr) own_memory_->use(place.stream);
  if (on_device_ != nullptr) on_device_->use(place.stream);
}

StepHeads heads_of_step(const Attention& attention, Range heads_q, Range heads_k) {
  StepHeads part{attention, {}};
  if (attention.sink.kind == Sink::Kind::learnable)
    part.attention.sink.logits = run::some_heads(attention.sink.logits, heads_q);
  for (Index h = heads_q.begin; h < heads_q.end && !attention.head_map.empty(); ++h)
    part.map.push_back(attention.head_map[at(h)] - heads_k.begin);
  part.attention.head_map = part.map;
  return part;
}

std::span<const Slice> slices_of(const Schedule& schedule, const Step& step) {
  return schedule.plans[at(step.plan)].slices;
}

RowsOfSteps rows_of_steps(const StepList& steps) {
  std::vector<Range> rows;
  for (const Plan& plan : steps.plans())
    for (const Slice& s : plan.slices) rows.push_back({s.q_begin, s.q_end});
  RowsOfSteps held{joined(std::move(rows), false), {}};
  held.ends.resize(held.rows.size());
  const Computed computed(steps);
  Index call = 0;
  for (Index n = 0; n < steps.size(); ++n) {
    if (!computed(n)) continue;
    for (const Slice& s : steps.slices(n)) {
      const auto of =
          std::partition_point(held.rows.begin(), held.rows.end(), [&](const Range& r) { return r.end <= s.q_begin; });
      held.ends[at(of - held.rows.begin())] = call;
    }
    ++call;
  }
  return held;
}

Computed::Computed(const StepList& steps) {
  std::vector<Heads> ranges;  // equal or disjoint
  std::vector<Index> times;
  for (Index n = 0; n < steps.size(); ++n) {
    const Heads heads{steps.heads_q(n), steps.heads_k(n)};
    const bool computed = !steps.slices(n).empty() && heads.q.size() > 0;
    if (computed) last_ = n;
    steps_.push_back(computed);
    const auto same = [&](const Heads& other) { return other.q == heads.q; };
    const auto range = at(std::find_if(ranges.begin(), ranges.end(), same) - ranges.begin());
    if (range == ranges.size()) {
      ranges.push_back(heads);
      times.push_back(0);
    }
    times[range] += computed ? 1 : 0;
  }
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    once_ = once_ && times[i] <= 1;
    if (times[i] == 0 && ranges[i].q.size() > 0) blind_.push_back(ranges[i]);
  }
}

namespace {

void check_device_plans(const Schedule& s, std::span<DevicePlan* const> plans, const Place& place) {
  if (plans.empty()) return;
  if (plans.size() != s.plans.size())
    throw Error(text(plans.size(), " device plans for the ", s.plans.size(), " plans of the schedule"),
                "give one for each of Schedule::plans");
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const DeviceSlices planned = plans[i]->slices();
    const Plan& wanted = s.plans[i];
    if (planned.q_rows != wanted.q_rows || planned.k_rows != wanted.k_rows)
      throw Error(text("device plan ", i, " is for ", planned.q_rows, " query rows and ", planned.k_rows,
                       " key rows, and that of the schedule for ", wanted.q_rows, " and ", wanted.k_rows),
                  "plan with the rows that the schedule was made for");
    if (plans[i]->place().device != place.device || plans[i]->place().stream != place.stream)
      throw Error(text("device plan ", i, " is made in another stream than the tensors' (", name(place), ")"),
                  "make it with a context of the call's stream");
  }
}

template <class Args>
void check_shape(const Schedule& s, const Args& args) {
  const ConstTensorView &q = args.q, &k = args.k;
  const Attention& attention = args.attention;
  require_support({.schedule = s.options.kind,
                   .key_order = s.options.key_order,
                   .stride_q = s.layouts.q.rank_order().stride(),
                   .stride_k = s.layouts.k.rank_order().stride(),
                   .dtype = q.dtype,
                   .bias = attention.bias.given(),
                   .dropout = attention.dropout});
  if (q.rows != s.q_rows || k.rows != s.k_rows)
    throw Error(text("rank ", s.rank, ": q has ", q.rows, " rows and k has ", k.rows, ", the layouts ", s.q_rows,
                     " and ", s.k_rows),
                "give each rank its own rows (Layout::shard)");
  if (q.heads != s.heads_q || k.heads != s.heads_k)
    throw Error(text("q has ", q.heads, " heads and k has ", k.heads, ", the schedule ", s.heads_q, " and ", s.heads_k),
                "make the schedule with the heads of the tensors");
  if (!std::equal(attention.head_map.begin(), attention.head_map.end(), s.head_map.begin(), s.head_map.end()))
    throw Error("the head map is not the one that the schedule was made with",
                "give make_schedule the same Heads::map");
  check_device_plans(s, args.device_plans, args.place);
}

}  // namespace

std::unique_ptr<Agreement> agree(Communicator& ranks, const Schedule& schedule, const ExecutorOptions& options) {
  if (!options.checked) return nullptr;
  auto agreement = std::make_unique<Agreement>(ranks);
  std::vector<Fingerprint> what = fingerprints(schedule);
  for (const Fingerprint& f : fingerprints(options)) what.push_back(f);
  agreement->compare({CallKind::make_executor}, what);
  return agreement;
}

DevicePlan* device_plan(std::span<DevicePlan* const> plans, const Step& step) {
  return plans.empty() ? nullptr : plans[at(step.plan)];
}

void check_forward(const Schedule& s, const ExecutorForwardArgs& args) {
  check_shape(s, args);
  weft::check_forward(forward_call(args, {args.k, args.v}));
}

void check_backward(const Schedule& s, const ExecutorBackwardArgs& args) {
  check_shape(s, args);
  weft::check_backward(backward_call(args, {args.k, args.v}));
  if (!args.out.given() && args.q.rows > 0)  // without rows, a tensor that is given looks like one that is left out
    throw Error("out and lse are left out", "give both, as the forward wrote them");
}

}  // namespace run

Kernel Executor::Data::kernel_for(KernelRequest request, bool device_plans) const {
  request.partial = request.pass == Pass::forward && (!schedule.query_moves.empty() || !run::Computed(schedule).once());
  request.device_plan = device_plans;
  return select_kernel(options.kernel, request);
}

const run::SourceMoves& Executor::Data::source_moves() {
  if (moves_of_source == nullptr) moves_of_source = std::make_shared<const run::SourceMoves>(schedule);
  return *moves_of_source;
}

Executor::Executor(Communicator& communicator, Schedule schedule, ExecutorOptions options) {
  if (communicator.rank() != schedule.rank || communicator.ranks() != schedule.ranks)
    throw Error(text("the schedule is that of rank ", schedule.rank, " of ", schedule.ranks,
                     " and the communicator that of rank ", communicator.rank(), " of ", communicator.ranks()),
                "make the schedule with communicator.rank() and a layout of communicator.ranks()");
  find_kernel(options.kernel);  // Error here rather than in the first call
  data_ = std::make_unique<Data>(communicator, std::move(schedule), std::move(options));
}

Executor::~Executor() = default;
Executor::Executor(Executor&&) noexcept = default;

const Schedule& Executor::schedule() const { return data_->schedule; }
Index Executor::workspace_bytes() const { return data_->workspace.held(); }

}  // namespace weft
