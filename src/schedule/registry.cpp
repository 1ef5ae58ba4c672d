// The schedules by kind and name.
#include <algorithm>
#include <utility>

#include "index.h"
#include "schedule/description.h"
#include "text.h"

namespace weft::schedule {

#define WEFT_SCHEDULE(name) Definition name();
#include "schedule/schedules.inc"
#undef WEFT_SCHEDULE

std::span<const Definition> registry() {
#define WEFT_SCHEDULE(name) name(),
  static const Definition all[] = {
#include "schedule/schedules.inc"
  };
#undef WEFT_SCHEDULE
  return all;
}

const Definition& definition(ScheduleKind kind) {
  const auto n = static_cast<std::size_t>(kind);
  if (n >= registry().size())
    throw Error(text("there is no schedule ", n), text("use one of the ", registry().size(), " of schedule_kinds()"));
  return registry()[n];
}

Description describe_schedule(const ScheduleOptions& options, const Shape& shape) {
  check_options(options);
  Description d = definition(options.kind).describe(options, shape);
  const auto size = static_cast<Index>(d.steps.size()), groups = swapped_groups(d);
  for (Index n = 0; n < size; ++n) {
    const StepDescription& step = d.steps[at(n)];
    if (step.move == Move::Kind::send && definition(options.kind).by_lengths.empty())
      throw Error(text(name(options.kind), " sends the rows that are seen, which needs lengths on the host"),
                  "say so in the by_lengths of its definition");
    if (d.ulysses == 0) continue;
    if (step.move == Move::Kind::send)
      throw Error(text(name(options.kind), " sends the rows that are seen after a swap of heads"),
                  "describe it with Move::Kind::gather");
    const Index each = size / groups;  // steps of a head group
    if (step.parts != groups || size % groups != 0 || step.head_part != n / each ||
        !same_keys(step, d.steps[at(n % each)]))
      throw Error(text(name(options.kind), " has other steps for head group ", step.head_part, " than for the first"),
                  "describe it with in_head_groups");
  }
  return d;
}

std::vector<ScheduleOptions> all_candidates(const Shape& shape, std::span<const Index> levels) {
  std::vector<const Definition*> order;
  for (const Definition& d : registry())
    if (d.candidates != nullptr) order.push_back(&d);
  // Definitions lie in one array, so that those of equal order stay in the order of the registry.
  std::sort(order.begin(), order.end(), [](const Definition* a, const Definition* b) {
    return std::pair(a->tie_order, a) < std::pair(b->tie_order, b);
  });
  std::vector<ScheduleOptions> all;
  for (const Definition* d : order)
    for (ScheduleOptions each : d->candidates(shape, levels)) {
      each.kind = schedule_kind(d->name);
      all.push_back(each);
    }
  return all;
}

std::vector<ScheduleOptions> with_nodes(std::vector<ScheduleOptions> all, const Shape& shape,
                                        std::span<const Index> levels) {
  const Index node = levels.size() > 1 ? levels.front() : 1;
  if (node <= 1 || node >= shape.ranks || shape.ranks % node != 0) return all;
  for (std::size_t n = 0, flat = all.size(); n < flat; ++n) {
    all.push_back(all[n]);
    all.back().node = node;
  }
  return all;
}

Index step_of_same_keys(const Description& d, Index n) {
  const auto same = [&](Index before) {
    return before >= 0 && same_keys(d.steps[at(n)], d.steps[at(before)]) ? before : -1;
  };
  if (const Index last = same(n - 1); last >= 0) return last;
  const Index each = static_cast<Index>(d.steps.size()) / d.steps[at(n)].parts;  // steps of a head group
  return d.steps[at(n)].head_part > 0 ? same(n - each) : -1;
}

std::vector<StepDescription> in_head_groups(const std::vector<StepDescription>& steps, Index groups) {
  std::vector<StepDescription> all;
  for (Index part = 0; part < groups; ++part)
    for (StepDescription step : steps) {
      step.head_part = part;
      step.parts = groups;
      all.push_back(step);
    }
  return all;
}

void check_head_groups(Index groups, Index heads, std::string_view which) {
  if (groups > heads)
    throw Error(text("head_groups ", groups, " with ", heads, " ", which, " heads"),
                text("use from 1 to ", heads, " groups"));
}

Index groups_a_node(Index node, Index groups) {
  if (groups % node != 0)
    throw Error(text("nodes of ", node, " do not divide ", groups, " ranks or groups of ranks"),
                "use a node option that divides them, or 1 for one level of links");
  return node == groups ? 1 : node;
}

Index relay_distance(const Description& d, Index n) {
  return is_shift(d, n - 1) ? d.steps[at(n)].distances.begin - d.steps[at(n - 1)].distances.begin : 0;
}

Range last_met(const Description& d, Index n) {
  const Range met = d.steps[at(n)].distances;
  if (!is_shift(d, n + 1)) return met;
  const Index on = d.steps[at(n + 1)].distances.end - relay_distance(d, n + 1);  // up to here they travel on
  return {min_of(met.end, max_of(met.begin, on)), met.end};
}

}  // namespace weft::schedule

namespace weft {

std::span<const ScheduleKind> schedule_kinds() {
  static const std::vector<ScheduleKind> kinds = [] {
    std::vector<ScheduleKind> all;
    for (std::size_t n = 0; n < schedule::registry().size(); ++n) all.push_back(static_cast<ScheduleKind>(n));
    return all;
  }();
  return kinds;
}

std::string_view name(ScheduleKind kind) { return schedule::definition(kind).name; }
std::string_view about(ScheduleKind kind) { return schedule::definition(kind).help; }
std::span<const std::string_view> other_names(ScheduleKind kind) { return schedule::definition(kind).other_names; }

ScheduleKind schedule_kind(std::string_view given) {
  std::string names;
  for (const ScheduleKind kind : schedule_kinds()) {
    const std::span<const std::string_view> others = other_names(kind);
    if (name(kind) == given || std::find(others.begin(), others.end(), given) != others.end()) return kind;
    names += text(names.empty() ? "" : ", ", name(kind));
    for (const std::string_view other : others) names += text(other == others.front() ? " (or " : ", ", other);
    if (!others.empty()) names += ")";
  }
  throw Error(text("there is no schedule '", given, "'"), text("use one of ", names));
}

}  // namespace weft
