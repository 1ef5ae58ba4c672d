// Ulysses over all ranks: each attends all tokens for its share of the heads, so that no keys move afterwards.
#include "schedule/description.h"

namespace weft::schedule {

Definition all_to_all() {
  return {.name = "all_to_all",
          .help = "ranks swap heads for sequence (DeepSpeed-Ulysses)",
          .other_names = {"a2a", "ulysses"},
          .describe =
              [](const ScheduleOptions&, const Shape& shape) {
                return Description{.ulysses = shape.ranks > 1 ? shape.ranks : 0, .steps = {{}}};
              },
          .candidates = [](const Shape& shape, std::span<const Index>) -> std::vector<ScheduleOptions> {
            if (shape.ranks == 1 || shape.ranks > shape.heads_q) return {};
            return {{}};
          },
          .tie_order = 3};
}

}  // namespace weft::schedule
