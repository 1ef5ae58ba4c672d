#include "weft/simulate.h"

#include <algorithm>
#include <tuple>

#include "cost/engine.h"
#include "cost/tiles.h"

namespace weft {
namespace {

Timeline run(const cost::Outline& outline, const TensorShape& shape, const Machine& machine, Pass pass,
             const SimulateOptions& options) {
  Timeline t{.pass = pass};
  t.memory = outline.memory;
  t.planned = outline.planned;
  cost::Record record(outline, options, t);
  if (machine.processor_ranks == 1 && machine.processor_kernels >= 1)
    cost::run_in_step(outline, machine, pass, options, record);
  else
    cost::run_shared(outline, machine, pass, options, record);
  double pairs = 0;
  for (std::size_t r = 0; r < t.ranks.size(); ++r) {
    t.ranks[r].pairs = outline.pairs[r];
    t.ranks[r].waiting += t.seconds - t.ranks[r].end;
    pairs += static_cast<double>(outline.pairs[r]);
  }
  const Index together = machine.processor_ranks == 0 ? outline.ranks : machine.processor_ranks;
  const double kernels = static_cast<double>(ceil_div(outline.ranks, together)) *
                         std::min(machine.processor_kernels, static_cast<double>(together));
  const KernelRate& rate = kernel_rate(machine, pass, shape);
  t.ideal = pairs * cost::flops_a_pair(shape, pass) / rate.flops / std::max(kernels, 1e-9);
  for (RankTimeline& rank : t.detail)
    std::sort(rank.events.begin(), rank.events.end(), [](const TimelineEvent& a, const TimelineEvent& b) {
      return std::tie(a.begin, a.end, a.step, a.kind, a.name) < std::tie(b.begin, b.end, b.step, b.kind, b.name);
    });
  return t;
}

}  // namespace

std::string_view name(TimelineEvent::Kind kind) {
  switch (kind) {
    case TimelineEvent::Kind::compute:
      return "compute";
    case TimelineEvent::Kind::exchange:
      return "exchange";
    case TimelineEvent::Kind::rows:
      return "rows";
    case TimelineEvent::Kind::wait:
      break;
  }
  return "wait";
}

double Timeline::overlap() const {
  double exchange = 0, overlapped = 0;
  for (const RankTimes& r : ranks) {
    exchange += r.exchange;
    overlapped += r.overlapped;
  }
  return exchange > 0 ? overlapped / exchange : 1;
}

Index Timeline::slowest() const {
  const auto most = std::max_element(ranks.begin(), ranks.end(),
                                     [](const RankTimes& a, const RankTimes& b) { return a.compute < b.compute; });
  return most - ranks.begin();
}

double Timeline::straggling() const {
  double sum = 0, most = 0;
  for (const RankTimes& r : ranks) {
    sum += r.compute;
    most = std::max(most, r.compute);
  }
  return sum > 0 ? most * static_cast<double>(ranks.size()) / sum : 1;
}

Index Timeline::bytes_in() const {
  Index most = 0;
  for (const RankTimes& r : ranks) most = max_of(most, r.bytes_in);
  return most;
}

Timeline simulate(const Job& job, const Machine& machine, Pass pass, const SimulateOptions& options) {
  check_machine(machine);
  return run(cost::outline_of(job, machine, pass), job.shape, machine, pass, options);
}

Timeline simulate(std::span<const Schedule> schedules, const TensorShape& shape, const Machine& machine, Pass pass,
                  const SimulateOptions& options) {
  check_machine(machine);
  return run(cost::outline_of(schedules, shape, machine, pass), shape, machine, pass, options);
}

}  // namespace weft
