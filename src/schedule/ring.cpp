// K and V go around: after the own keys a rank meets those of `abreast` groups a step, first the groups right before
// its own. What a step brought goes on to the group `abreast` further, whose next step it is.
#include "schedule/schedules.h"
#include "text.h"
#include "weft/error.h"

namespace weft::schedule {
namespace {

// Adds slices whose keys come after those that the plan has.
void append_keys(const Plan& more, Plan& plan) {
  for (Slice s : more.slices) {
    s.k_begin += plan.k_rows;
    s.k_end += plan.k_rows;
    s.lo = shift_bound(s.lo, plan.k_rows);
    s.hi = shift_bound(s.hi, plan.k_rows);
    plan.slices.push_back(s);
  }
  plan.k_rows += more.k_rows;
}

// Keys of the groups at these distances before the own one, and gradients of those that travel no further.
Move shift(const Groups& groups, Index abreast, Range distances, Index rows) {
  const auto at = [&](Index distance) { return groups.peer((groups.mine + groups.count + distance) % groups.count); };
  const auto place = [&](Index distance) {
    return Range{(distance - distances.begin) * rows, (distance - distances.begin + 1) * rows};
  };
  Move move{.kind = Move::Kind::shift, .sends = {}, .receives = {}};
  if (distances.begin == 1) {
    for (Index d = distances.begin; d < distances.end; ++d) {
      move.sends.push_back({at(d), {{0, rows}}});
      move.receives.push_back({at(-d), {place(d)}});
    }
  } else {
    const std::vector<Range> all = {{0, distances.size() * rows}};
    move.sends.push_back({at(abreast), all});
    move.receives.push_back({at(-abreast), all});
  }
  for (Index d = max_of(distances.begin, groups.count - abreast); d < distances.end; ++d) {
    move.home.push_back({at(-d), {place(d)}});
    move.back.push_back({at(d), {{0, rows}}});
  }
  return move;
}

}  // namespace

void ring(Schedule& s) {
  const Groups groups(s);
  const RunList queries = s.layouts.q.rank_order(groups.members(groups.mine));
  const Index abreast = min_of(s.options.abreast, groups.count), steps = ring_steps(groups.count, abreast);
  for (Index n = 0; n < steps; ++n) {
    const Range distances = ring_distances(groups.count, abreast, n);
    Plan plan{.slices = {}, .q_rows = queries.rows(), .k_rows = 0};
    for (Index d = distances.begin; d < distances.end; ++d) {
      const Index from = (groups.mine + groups.count - d) % groups.count;
      append_keys(make_plan(s.problem, queries, s.layouts.k.rank_order(groups.members(from))), plan);
    }
    Step step{.move = {},
              .key_rows = plan.k_rows,
              .plan = n,
              .heads_q = {0, s.step_heads_q()},
              .heads_k = {0, s.step_heads_k()}};
    if (n > 0) step.move = shift(groups, abreast, distances, plan.k_rows / distances.size());
    s.steps.push_back(std::move(step));
    s.plans.push_back(std::move(plan));
  }
}

}  // namespace weft::schedule
