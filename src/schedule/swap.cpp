#include "index.h"
#include "schedule/schedules.h"

namespace weft::schedule {
namespace {

Index kv_head(const Schedule& s, Index q) {
  return s.head_map.empty() ? q / (s.heads_q / s.heads_k) : s.head_map[at(q)];
}

}  // namespace

void swap_heads(Schedule& s, Index inside) {
  const Index first = s.rank / inside * inside;
  Swap swap{.group = {first, first + inside}, .heads_q = {}, .heads_k = {}, .head_map = {}};
  for (Index i = 0; i < inside; ++i) {
    const Range q{s.heads_q * i / inside, s.heads_q * (i + 1) / inside};
    Range k;
    for (Index h = q.begin; h < q.end; ++h) {
      const Index of = kv_head(s, h);
      k = h == q.begin ? Range{of, of + 1} : Range{min_of(k.begin, of), max_of(k.end, of + 1)};
    }
    swap.heads_q.push_back(q);
    swap.heads_k.push_back(k);
  }
  const auto me = at(s.rank - first);
  for (Index h = swap.heads_q[me].begin; h < swap.heads_q[me].end; ++h)
    swap.head_map.push_back(kv_head(s, h) - swap.heads_k[me].begin);
  s.swap = std::move(swap);
}

void stay(Schedule& s) {
  const Groups groups(s);
  const RunList keys = s.layouts.k.rank_order(groups.members(groups.mine));
  s.plans.push_back(make_plan(s.problem, s.layouts.q.rank_order(groups.members(groups.mine)), keys));
  s.steps.push_back({.key_rows = keys.rows(), .heads_q = {0, s.step_heads_q()}, .heads_k = {0, s.step_heads_k()}});
}

}  // namespace weft::schedule
