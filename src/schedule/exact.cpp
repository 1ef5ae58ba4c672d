// Each rank is sent the rows that its slices touch and no others: a window moves a halo, a document on one rank
// nothing.
#include "schedule/description.h"

namespace weft::schedule {
namespace {

// Peers at the same distance are in the same stage on every rank, so that both sides of a message agree.
Description describe(const ScheduleOptions& o, const Shape& shape) {
  const Index others = shape.ranks - 1, stages = min_of(o.stages, others);
  check_head_groups(o.head_groups, shape.heads_k, "K/V");
  Description d{.steps = {{}}, .node = groups_a_node(o.node, shape.ranks)};
  if (o.head_groups > 1 && others > 0) {
    // Own rows and others' in one buffer and one step: nothing is merged, and a group of heads comes while the one
    // before is attended.
    const Range all = d.node > 1 ? Range{0, shape.ranks / d.node} : Range{0, shape.ranks};
    d.steps = in_head_groups({{.move = Move::Kind::send, .distances = all, .by_node = d.node > 1, .own = true}},
                             o.head_groups);
    return d;
  }
  if (d.node > 1) {
    // All ranks of a node get what they see of a rank in the same stage, so that a row crosses once.
    const Index nodes = shape.ranks / d.node, parts = min_of(o.stages, nodes);
    for (Index n = 0; n < parts; ++n)
      d.steps.push_back(
          {.move = Move::Kind::send, .distances = {nodes * n / parts, nodes * (n + 1) / parts}, .by_node = true});
    return d;
  }
  for (Index n = 0; n < stages; ++n)
    d.steps.push_back(
        {.move = Move::Kind::send, .distances = {others * n / stages + 1, others * (n + 1) / stages + 1}});
  return d;
}

std::vector<ScheduleOptions> candidates(const Shape& shape, std::span<const Index> levels) {
  if (shape.ranks == 1) return {{.stages = 1}};
  std::vector<ScheduleOptions> all = {{.stages = 1}};
  if (shape.ranks > 2) all.push_back({.stages = 2});
  if (shape.ranks > 3) all.push_back({});  // the default, 4
  constexpr Index kGroups = 4;
  if (shape.heads_k > 1) all.push_back({.head_groups = min_of(kGroups, shape.heads_k)});
  return with_nodes(std::move(all), shape, levels);
}

}  // namespace

Definition exact() {
  return {.name = "exact",
          .help = "each rank is sent the rows that it sees",
          .options = {"stages", "node", "head_groups"},
          .describe = describe,
          .candidates = candidates,
          .source = true,
          .by_lengths = "whose messages depend on lengths",
          .tie_order = 0};
}

}  // namespace weft::schedule
