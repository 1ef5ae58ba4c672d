// Every rank gathers all K and V, at once or a group of heads at a time.
#include "schedule/description.h"

namespace weft::schedule {
namespace {

Description describe(const ScheduleOptions& o, const Shape& shape) {
  check_head_groups(o.head_groups, shape.heads_k, "K/V");
  // One rank has all keys. In sequence order, if told, because its rows may lie in another one.
  if (shape.ranks == 1 && o.key_order != KeyOrder::sequence) return {.steps = {{}}};
  const bool sequence =
      o.key_order == KeyOrder::sequence || (o.key_order == KeyOrder::automatic && shape.key_stride == 1);
  Description d{.node = groups_a_node(o.node, shape.ranks)};
  d.steps = in_head_groups({{.move = Move::Kind::gather, .distances = {0, shape.ranks}, .sequence_order = sequence}},
                           o.head_groups);
  return d;
}

std::vector<ScheduleOptions> candidates(const Shape& shape, std::span<const Index> levels) {
  constexpr Index kGroups = 4;
  if (shape.ranks == 1) return {};
  if (shape.heads_k == 1) return with_nodes({{}}, shape, levels);
  return with_nodes({{}, {.head_groups = min_of(kGroups, shape.heads_k)}}, shape, levels);
}

}  // namespace

Definition all_gather() {
  return {.name = "all_gather",
          .help = "every rank gathers all K and V",
          .options = {"key_order", "head_groups", "node"},
          .describe = describe,
          .candidates = candidates,
          .source = true,
          .outer = true,
          .tie_order = 2};
}

}  // namespace weft::schedule
