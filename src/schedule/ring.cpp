// K and V go around: in step n a rank attends the keys that came from n ranks before it.
#include "schedule/schedules.h"

namespace weft::schedule {

void ring(Schedule& s) {
  const Range all{0, s.k_rows};
  for (Index n = 0; n < s.ranks; ++n) {
    const Index from = (s.rank - n + s.ranks) % s.ranks;
    s.plans.push_back(make_plan(s.problem, s.layouts.q.runs(s.rank), s.layouts.k.runs(from)));
    Step step{.move = {}, .key_rows = s.k_rows, .plan = n, .heads_q = {0, s.heads_q}, .heads_k = {0, s.heads_k}};
    if (n > 0)
      step.move = Move{.kind = Move::Kind::shift,
                       .sends = {{(s.rank + 1) % s.ranks, {all}}},
                       .receives = {{(s.rank + s.ranks - 1) % s.ranks, {all}}}};
    s.steps.push_back(std::move(step));
  }
}

}  // namespace weft::schedule
