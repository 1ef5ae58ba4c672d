// K and V go around: in step n a rank attends the keys that came from n groups before its own.
#include "schedule/schedules.h"

namespace weft::schedule {

void ring(Schedule& s) {
  const Groups groups(s);
  const RunList queries = s.layouts.q.rank_order(groups.members(groups.mine));
  for (Index n = 0; n < groups.count; ++n) {
    const Index from = (groups.mine - n + groups.count) % groups.count;
    const RunList keys = s.layouts.k.rank_order(groups.members(from));
    s.plans.push_back(make_plan(s.problem, queries, keys));
    Step step{.move = {},
              .key_rows = keys.rows(),
              .plan = n,
              .heads_q = {0, s.step_heads_q()},
              .heads_k = {0, s.step_heads_k()}};
    const std::vector<Range> all = {{0, keys.rows()}};
    if (n > 0)
      step.move = Move{.kind = Move::Kind::shift,
                       .sends = {{groups.peer((groups.mine + 1) % groups.count), all}},
                       .receives = {{groups.peer((groups.mine + groups.count - 1) % groups.count), all}}};
    s.steps.push_back(std::move(step));
  }
}

}  // namespace weft::schedule
