#include "schedule/source.h"

#include "index.h"
#include "schedule/build.h"
#include "schedule/groups.h"

namespace weft::schedule {
namespace {

// Appends the tokens of the rows of a buffer.
void append_tokens(const RunList& list, std::vector<Index>& to) {
  const std::size_t first = to.size();
  to.resize(first + at(list.rows()), kNoToken);
  for (const Run& run : list.runs())
    for (Index i = 0; i < run.count; ++i) to[first + at(run.row + i)] = run.token + i * run.stride;
}

// Appends those of the rows of a group that the own queries see.
void append_seen(const Groups& groups, Index group, std::vector<Index>& to) {
  std::vector<Index> all;
  append_tokens(groups.keys(group), all);
  for (const Range& r : touched_keys(groups.plan(group)))
    to.insert(to.end(), all.begin() + r.begin, all.begin() + r.end);
}

// In the order in which send and send_by_node let rows of the groups arrive.
void append_sent(const Groups& groups, const Description& d, const StepDescription& step, std::vector<Index>& to) {
  for (Index distance = step.distances.begin; distance < step.distances.end; ++distance) {
    if (!step.by_node) {
      append_seen(groups, groups.at_distance(distance), to);
      continue;
    }
    const Index first = floor_mod(groups.mine() / d.node - distance, groups.count() / d.node) * d.node;
    for (Index group = first; group < first + d.node; ++group)
      if (group != groups.mine() || step.own) append_seen(groups, group, to);
  }
}

}  // namespace

bool same_rows_as_before(const Schedule& s, Index step) {
  if (step == 0) return false;
  const Step &one = s.steps[at(step - 1)], &other = s.steps[at(step)];
  return one.plan == other.plan && one.head_group == other.head_group;
}

Schedule source_moves(const Schedule& s) {
  Schedule moves{.options = s.options,
                 .problem = s.problem,
                 .layouts = s.layouts,
                 .rank = s.rank,
                 .ranks = s.ranks,
                 .q_rows = s.q_rows,
                 .k_rows = s.k_rows,
                 .heads_q = s.heads_q,
                 .heads_k = 1,
                 .head_map = {},
                 .swap = s.swap,
                 .query_moves = {},
                 .seeing = {},
                 .plans = {},
                 .steps = {}};
  for (Index n = 0; n < static_cast<Index>(s.steps.size()); ++n) {
    if (same_rows_as_before(s, n)) continue;
    moves.steps.push_back(s.steps[at(n)]);
    moves.steps.back().heads_k = {0, 1};
  }
  if (!moves.swap) return moves;
  // It goes to every rank of the group that has query heads, with the first head group, and stays for the others.
  Swap& swap = *moves.swap;
  for (std::size_t i = 0; i < swap.heads_q.size(); ++i) {
    const Range source = swap.heads_q[i].size() > 0 ? Range{0, 1} : Range{};
    swap.heads_k[i] = source;
    for (HeadGroup& group : swap.head_groups) group.k[i] = source;
  }
  const Index mine = swap.heads_k[at(s.rank - swap.group.begin)].size();
  for (Step& step : moves.steps) step.heads_k = {0, mine};
  return moves;
}

std::vector<std::vector<Index>> tokens_of_moves(const Schedule& s) {
  const Description d = describe_schedule(s.options, shape_of(s.layouts, {s.heads_q, s.heads_k, s.head_map}));
  const Groups groups(s);
  std::vector<std::vector<Index>> all;
  for (Index n = 0; n < static_cast<Index>(s.steps.size()); ++n) {
    if (same_rows_as_before(s, n)) continue;
    const StepDescription& step = d.steps[at(n)];
    std::vector<Index>& tokens = all.emplace_back();
    if (meets_all(step, groups.count())) {
      append_tokens(step.sequence_order ? s.layouts.k.sequence_order() : s.layouts.k.rank_order(), tokens);
    } else if (meets_node(step)) {
      const Index nodes = groups.count() / d.node;
      append_tokens(groups.keys(floor_mod(groups.mine() / d.node - step.distances.begin, nodes) * d.node, d.node),
                    tokens);
    } else if (step.move == Move::Kind::send) {
      append_sent(groups, d, step, tokens);
    } else {
      for (Index distance = step.distances.begin; distance < step.distances.end; ++distance)
        append_tokens(groups.keys(groups.at_distance(distance)), tokens);
    }
  }
  return all;
}

}  // namespace weft::schedule
