// K and V go around: after the own keys a rank meets those of `ranks_per_step` groups a step, first the groups right
// before its own. What a step brought goes on to the group so many further, whose next step it is. Where groups stand
// in nodes, a step brings the keys of a node, the own one first: each of its rows enters the own node once, straight
// from its owner, and is passed on inside, while the node before is attended.
#include "schedule/description.h"

namespace weft::schedule {
namespace {

Description describe(const ScheduleOptions& o, const Shape& shape) {
  if (const Index node = groups_a_node(o.node, shape.ranks); node > 1) {
    Description d{.node = node};
    for (Index n = 0; n < shape.ranks / node; ++n)
      d.steps.push_back({.move = Move::Kind::gather, .distances = {n, n + 1}, .by_node = true});
    return d;
  }
  Description d{.steps = {{}}};
  for (Index first = 1; first < shape.ranks; first += o.ranks_per_step)
    d.steps.push_back({.move = Move::Kind::shift, .distances = {first, min_of(first + o.ranks_per_step, shape.ranks)}});
  return d;
}

std::vector<ScheduleOptions> candidates(const Shape& shape, std::span<const Index> levels) {
  if (shape.ranks == 1) return {};
  std::vector<ScheduleOptions> all = {{}};
  if (shape.ranks > 2) all.push_back({.ranks_per_step = 1});  // half the buffers
  if (shape.ranks > 4) all.push_back({.ranks_per_step = 4});  // fewer, longer messages
  const std::vector<ScheduleOptions> by_node = with_nodes({{}}, shape, levels);
  all.insert(all.end(), by_node.begin() + 1, by_node.end());
  return all;
}

}  // namespace

Definition ring() {
  return {.name = "ring",
          .help = "K and V travel around the ranks",
          .other_names = {"p2p"},
          .options = {"ranks_per_step", "node"},
          .describe = describe,
          .candidates = candidates,
          .source = true,
          .outer = true,
          .tie_order = 1};
}

}  // namespace weft::schedule
