#include "weft/capacity.h"

#include "index.h"
#include "schedule/build.h"
#include "schedule/groups.h"
#include "weft/error.h"
#include "weft/support.h"

namespace weft {
namespace {

Stream whole_stream(Index tokens) {
  const std::vector<Index> all = {0, tokens};
  return Stream::from_cu_seqlens({.cu_seqlens = all});
}

ScheduleOptions without_lengths(ScheduleOptions options) {
  if (options.key_order == KeyOrder::sequence)
    throw Error("keys in sequence order, and lengths are not known on the host", "leave key_order out, or use rank");
  options.key_order = KeyOrder::rank;
  options.ranks_per_step = 1;  // the keys of a step are those of one group: one plan
  return options;
}

}  // namespace

CapacitySchedule capacity_schedule(const Capacity& c, const Heads& heads, ScheduleOptions options) {
  options = without_lengths(options);
  // Any layout with these numbers of rows has the same moves.
  const Problem any(Packing(whole_stream(c.ranks * c.q_rows), whole_stream(c.ranks * c.k_rows)), Mask{});
  const Layouts layouts = make_layouts(LayoutKind::contiguous, any, c.ranks);
  const schedule::Description d = schedule::describe_schedule(options, schedule::shape_of(layouts, heads));
  require_support({.schedule = options.kind, .device_lengths = true});
  CapacitySchedule made{make_schedule(any, layouts, c.rank, heads, options), {}};
  const schedule::Groups groups(made.schedule);
  const Index size = made.schedule.ulysses();
  made.met.resize(made.schedule.plans.size());
  for (std::size_t n = 0; n < d.steps.size(); ++n) {
    const schedule::StepDescription& step = d.steps[n];
    RunList::Members keys{groups.at_distance(step.distances.begin) * size, size, 1};
    if (schedule::meets_all(step, groups.count())) keys = {0, c.ranks, 1};
    if (schedule::meets_node(step))
      keys = {schedule::gather_node(groups, d.node, step.distances.begin).first * size, d.node * size, 1};
    made.met[at(made.schedule.steps[n].plan)] = {.q = {groups.mine() * size, size, 1}, .k = keys};
  }
  return made;
}

}  // namespace weft
