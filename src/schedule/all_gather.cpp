// Every rank gathers all K and V, at once or a group of heads at a time.
#include <algorithm>

#include "index.h"
#include "schedule/schedules.h"
#include "text.h"
#include "weft/error.h"

namespace weft::schedule {
namespace {

void append(std::vector<Range>& to, Range next) {
  if (!to.empty() && to.back().end == next.begin)
    to.back().end = next.end;
  else
    to.push_back(next);
}

// Which rows of a group go where in the gathered buffer: all of them, or those that hold tokens to their tokens.
struct Placed {
  std::vector<Range> rows, to;
};
Placed placed(const Layout& layout, const Groups& groups, Index group, bool sequence_order) {
  const RunList list = layout.rank_order(groups.members(group));
  if (!sequence_order) return {{{0, list.rows()}}, {{group * list.rows(), (group + 1) * list.rows()}}};
  std::vector<weft::Run> runs = list.runs();
  std::sort(runs.begin(), runs.end(), [](const weft::Run& a, const weft::Run& b) { return a.row < b.row; });
  Placed p;
  for (const weft::Run& run : runs) {
    append(p.rows, {run.row, run.row + run.count});
    append(p.to, {run.token, run.token + run.count});
  }
  return p;
}

}  // namespace

Range query_heads(const Schedule& s, Range k) {
  const Index heads_q = s.step_heads_q(), heads_k = s.step_heads_k();
  if (heads_q == 0) return {};
  const std::vector<Index>& map = s.swap ? s.swap->head_map : s.head_map;
  if (map.empty()) return {k.begin * (heads_q / heads_k), k.end * (heads_q / heads_k)};
  Range q{heads_q, 0};
  Index count = 0;
  for (Index h = 0; h < heads_q; ++h) {
    const Index of = map[at(h)];
    if (of < k.begin || of >= k.end) continue;
    q = {min_of(q.begin, h), h + 1};
    ++count;
  }
  if (count > 0 && q.size() != count)
    throw Error(text("query heads of K/V heads ", k.begin, " to ", k.end - 1, " do not lie side by side"),
                "use head_groups = 1, or a head map that never falls");
  return count > 0 ? q : Range{};
}

void check_head_groups(const Schedule& s) {
  const Index head_groups = s.options.head_groups;
  if (head_groups < 1 || head_groups > s.heads_k)
    throw Error(text("head_groups ", head_groups, " with ", s.heads_k, " K/V heads"),
                text("use from 1 to ", s.heads_k, " groups"));
}

bool in_sequence_order(const Schedule& s) {
  return s.options.key_order == KeyOrder::sequence ||
         (s.options.key_order == KeyOrder::automatic && s.layouts.k.rank_order().stride() == 1);
}

void all_gather(Schedule& s) {
  const Layout& k = s.layouts.k;
  const Groups groups(s);
  const Index head_groups = s.options.head_groups, heads = s.step_heads_k();
  check_head_groups(s);
  const bool sequence = in_sequence_order(s);
  const RunList keys = sequence ? k.sequence_order() : k.rank_order();
  s.plans.push_back(make_plan(s.problem, s.layouts.q.rank_order(groups.members(groups.mine)), keys));
  Move move{.kind = Move::Kind::gather, .sends = {}, .receives = {}};
  const std::vector<Range> own = placed(k, groups, groups.mine, sequence).rows;
  for (Index g = 0; g < groups.count; ++g) {
    move.sends.push_back({groups.peer(g), own});
    move.receives.push_back({groups.peer(g), placed(k, groups, g, sequence).to});
  }
  for (Index g = 0; g < head_groups; ++g) {
    const Range heads_k{heads * g / head_groups, heads * (g + 1) / head_groups};
    s.steps.push_back(
        {.move = move, .key_rows = keys.rows(), .plan = 0, .heads_q = query_heads(s, heads_k), .heads_k = heads_k});
  }
}

}  // namespace weft::schedule
