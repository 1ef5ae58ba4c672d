// Ulysses over all ranks: each attends all tokens for its share of the heads, so that no keys move afterwards. At once,
// or a group of heads at a time: one is swapped in while another is attended and the one before goes back.
#include "schedule/description.h"

namespace weft::schedule {
namespace {

Description describe(const ScheduleOptions& o, const Shape& shape) {
  check_head_groups(o.head_groups, shape.heads_q, "query");
  if (shape.ranks == 1) return {.steps = {{}}};
  return {.ulysses = shape.ranks, .steps = in_head_groups({{}}, o.head_groups)};
}

// As many groups as a rank has query heads, and half of them: fewer calls.
std::vector<ScheduleOptions> candidates(const Shape& shape, std::span<const Index>) {
  if (shape.ranks == 1 || shape.ranks > shape.heads_q) return {};
  constexpr Index kMost = 8;
  std::vector<ScheduleOptions> all = {{}};
  const Index groups = min_of(kMost, shape.heads_q / shape.ranks);
  if (groups > 2) all.push_back({.head_groups = groups / 2});
  if (groups > 1) all.push_back({.head_groups = groups});
  return all;
}

}  // namespace

Definition all_to_all() {
  return {.name = "all_to_all",
          .help = "ranks swap heads for sequence (DeepSpeed-Ulysses)",
          .other_names = {"a2a", "ulysses"},
          .options = {"head_groups"},
          .describe = describe,
          .candidates = candidates,
          .source = true,
          .tie_order = 3};
}

}  // namespace weft::schedule
