#include "schedule/build.h"

#include <algorithm>

#include "index.h"
#include "ranges.h"
#include "schedule/groups.h"
#include "text.h"
#include "weft/support.h"

namespace weft {
namespace schedule {
namespace {

constexpr Index kMaxHeads = Index{1} << 20;  // far more than any model has

void check_heads(const Heads& heads) {
  if (heads.q < 1 || heads.k < 1)
    throw Error(text("heads ", heads.q, ":", heads.k), "use at least one query head and one K/V head");
  if (heads.q > kMaxHeads || heads.k > kMaxHeads)
    throw Error(text("heads ", heads.q, ":", heads.k), text("use at most ", kMaxHeads, " of each"));
  if (heads.map.empty() && heads.q % heads.k != 0)
    throw Error(text(heads.q, " query heads over ", heads.k, " K/V heads is no whole number"),
                "give a head map, or heads that divide");
  if (!heads.map.empty() && static_cast<Index>(heads.map.size()) != heads.q)
    throw Error(text("the head map has ", heads.map.size(), " entries for ", heads.q, " query heads"),
                "give one K/V head for each query head");
  for (const Index k : heads.map) {
    if (k < 0 || k >= heads.k)
      throw Error(text("the head map names K/V head ", k, " of ", heads.k), "use heads from 0 on");
  }
}

void check_layouts(const Problem& problem, const Layouts& layouts, Index rank) {
  if (layouts.q.ranks() != layouts.k.ranks())
    throw Error(text("queries lie on ", layouts.q.ranks(), " ranks and keys on ", layouts.k.ranks()),
                "use layouts of the same number of ranks");
  if (rank < 0 || rank >= layouts.q.ranks())
    throw Error(text("rank ", rank, " of ", layouts.q.ranks()), "ranks count from 0");
  if (!(layouts.q.stream() == problem.packing().q()) || !(layouts.k.stream() == problem.packing().k()))
    throw Error("the layouts were made for other streams than the problem's", "make them from the same packing");
}

Index kv_head(const Schedule& s, Index q) {
  return s.head_map.empty() ? q / (s.heads_q / s.heads_k) : s.head_map[at(q)];
}

// All K/V heads from the first to the last that these query heads use.
Range kv_heads(const Schedule& s, Range q) {
  Range k;
  for (Index h = q.begin; h < q.end; ++h) {
    const Index of = kv_head(s, h);
    k = h == q.begin ? Range{of, of + 1} : Range{min_of(k.begin, of), max_of(k.end, of + 1)};
  }
  return k;
}

}  // namespace

void add_shifted(Slice s, ShiftedBy rows, std::vector<Slice>& to) {
  s.q_begin += rows.q;
  s.q_end += rows.q;
  s.k_begin += rows.k;
  s.k_end += rows.k;
  s.lo = shift_bound(s.lo, rows.k - rows.q);
  s.hi = shift_bound(s.hi, rows.k - rows.q);
  to.push_back(s);
}

void add_touched(const Plan& plan, const std::vector<Range>& touched, Index first, std::vector<Slice>& slices) {
  std::vector<Index> places;  // of the touched ranges in the buffer
  for (const Range& r : touched) {
    places.push_back(first);
    first += r.size();
  }
  for (const Slice& given : plan.slices) {
    const Slice s = trimmed(given, true);
    // A slice touches one range of keys, so it lies in one of the ranges.
    const auto range = std::upper_bound(touched.begin(), touched.end(), s.k_begin,
                                        [](Index row, const Range& r) { return row < r.begin; }) -
                       touched.begin() - 1;
    add_shifted(s, {.k = places[at(range)] - touched[at(range)].begin}, slices);
  }
}

namespace {

class Builder {
 public:
  Builder(Schedule& s, const Description& d)
      : s_(s),
        d_(d),
        groups_(s),
        queries_(d.query_ranks > 1 ? s.layouts.q.runs(s.rank) : groups_.queries(groups_.mine())) {}

  void add_steps() {
    for (Index n = 0; n < static_cast<Index>(d_.steps.size()); ++n) {
      const StepDescription& step = d_.steps[at(n)];
      if (const Index same = step_of_same_keys(d_, n); same >= 0)
        s_.steps.push_back(Step(s_.steps[at(same)]));
      else
        add_keys(n, step);
      const StepHeads heads = step_heads(s_, step);
      s_.steps.back().heads_q = heads.q;
      s_.steps.back().heads_k = heads.k;
      s_.steps.back().head_group = s_.swap ? step.head_part : 0;
    }
  }

 private:
  void add_keys(Index n, const StepDescription& step) {
    Plan plan{.slices = {}, .q_rows = queries_.rows(), .k_rows = 0};
    std::optional<Move> move;
    if (meets_all(step, groups_.count())) {
      const Layout& k = s_.layouts.k;
      plan = make_plan(s_.problem, queries_, step.sequence_order ? k.sequence_order() : k.rank_order());
      move = d_.node > 1 ? gather_by_node(groups_, d_.node, step.sequence_order) : gather_all(step.sequence_order);
    } else if (meets_node(step)) {
      NodeAtDistance met = gather_node(groups_, d_.node, step.distances.begin);
      plan = make_plan(s_.problem, queries_, groups_.keys(met.first, d_.node));
      move = std::move(met.move);
    } else if (step.move == Move::Kind::send) {
      move = step.by_node ? send_by_node(groups_, d_.node, step.distances, {.own = step.own}, plan)
                          : send(step.distances, plan);
    } else {
      add_groups(step, plan);
      if (step.move) move = shift(n, *step.move);
    }
    const Range queries{step.queries.begin * queries_.rows(), step.queries.end * queries_.rows()};
    s_.steps.push_back({.move = std::move(move),
                        .again = step.again,
                        .key_rows = plan.k_rows,
                        .queries = queries,
                        .plan = static_cast<Index>(s_.plans.size())});
    s_.plans.push_back(std::move(plan));
  }

  // Slices of the parts of the queries against all keys of the groups at the step's distances.
  void add_groups(const StepDescription& step, Plan& plan) const {
    plan.q_rows = step.queries.size() * queries_.rows();
    for (Index d = step.distances.begin; d < step.distances.end; ++d, plan.k_rows += groups_.rows()) {
      for (Index part = step.queries.begin; part < step.queries.end; ++part) {
        const ShiftedBy rows{.k = plan.k_rows, .q = (part - step.queries.begin) * queries_.rows()};
        for (const Slice& s : groups_.plan(part, groups_.at_distance(d)).slices) add_shifted(s, rows, plan.slices);
      }
    }
  }

  Move gather_all(bool sequence_order) const {
    Move move{.kind = Move::Kind::gather, .sends = {}, .receives = {}};
    const std::vector<Range> own = groups_.placed(groups_.mine(), sequence_order).rows;
    for (Index g = 0; g < groups_.count(); ++g) {
      move.sends.push_back({groups_.peer(g), own});
      move.receives.push_back({groups_.peer(g), groups_.placed(g, sequence_order).to});
    }
    const auto as_many = [&](const PeerRows& p) { return rows_in(p.rows) == rows_in(own); };
    move.collective = groups_.count() == s_.ranks && s_.ranks > 1 && rows_in(own) > 0 &&
                      std::all_of(move.receives.begin(), move.receives.end(), as_many);
    return move;
  }

  Move send(Range distances, Plan& plan) const {
    Move move{.kind = Move::Kind::send, .sends = {}, .receives = {}};
    for (Index d = distances.begin; d < distances.end; ++d) {
      const Index from = groups_.at_distance(d), to = groups_.at_distance(-d);
      const Plan part = groups_.plan(from);
      const std::vector<Range> touched = touched_keys(part);
      if (!touched.empty()) {
        add_touched(part, touched, plan.k_rows, plan.slices);
        const Index rows = rows_in(touched);
        move.receives.push_back({groups_.peer(from), {{plan.k_rows, plan.k_rows + rows}}});
        plan.k_rows += rows;
      }
      std::vector<Range> wanted = groups_.touched(to, 1, groups_.mine());
      if (!wanted.empty()) move.sends.push_back({groups_.peer(to), std::move(wanted)});
    }
    return move;
  }

  // All rows of the groups at the step's distances, from their owners or from the step before.
  Move shift(Index n, Move::Kind kind) const {
    const Range distances = d_.steps[at(n)].distances;
    const Index rows = groups_.rows();
    const auto peer = [&](Index d) { return groups_.peer(groups_.at_distance(d)); };
    const auto place = [&](Index d) { return Range{(d - distances.begin) * rows, (d - distances.begin + 1) * rows}; };
    Move move{.kind = kind, .sends = {}, .receives = {}};
    if (const Index relay = relay_distance(d_, n); relay > 0) {
      const Range all{0, distances.size() * rows};
      move.sends.push_back({peer(-relay), {all}});
      move.receives.push_back({peer(relay), {all}});
    } else {
      for (Index d = distances.begin; d < distances.end; ++d) {
        move.sends.push_back({peer(-d), {{0, rows}}});
        move.receives.push_back({peer(d), {place(d)}});
      }
    }
    const Range last = kind == Move::Kind::shift ? last_met(d_, n) : Range{};
    for (Index d = last.begin; d < last.end; ++d) {
      move.home.push_back({peer(d), {place(d)}});
      move.back.push_back({peer(-d), {{0, rows}}});
    }
    return move;
  }

  Schedule& s_;
  const Description& d_;
  Groups groups_;
  RunList queries_;
};

}  // namespace

Shape shape_of(const Layouts& layouts, const Heads& heads) {
  return {.ranks = layouts.q.ranks(),
          .heads_q = heads.q,
          .heads_k = heads.k,
          .key_stride = layouts.k.rank_order().stride()};
}

Schedule unscheduled(const Problem& problem, const Layouts& layouts, Index rank, const Heads& heads,
                     const ScheduleOptions& options) {
  check_layouts(problem, layouts, rank);
  check_heads(heads);
  return {.options = options,
          .problem = problem,
          .layouts = layouts,
          .rank = rank,
          .ranks = layouts.q.ranks(),
          .q_rows = layouts.q.rows(),
          .k_rows = layouts.k.rows(),
          .heads_q = heads.q,
          .heads_k = heads.k,
          .head_map = {heads.map.begin(), heads.map.end()},
          .swap = {},
          .query_moves = {},
          .seeing = {},
          .plans = {},
          .steps = {}};
}

void require_layouts(const ScheduleOptions& options, const Layouts& layouts, bool source) {
  require_support({.schedule = options.kind,
                   .key_order = options.key_order,
                   .stride_q = layouts.q.runs(0).stride(),
                   .stride_k = layouts.k.runs(0).stride(),
                   .source = source});
}

void swap_heads(Schedule& s, Index ulysses, Index head_groups) {
  const Index first = s.rank / ulysses * ulysses;
  Swap swap{.group = {first, first + ulysses}, .heads_q = {}, .heads_k = {}, .head_map = {}, .head_groups = {}};
  const auto part_of = [](Range all, Index n, Index count) {
    return Range{all.begin + all.size() * n / count, all.begin + all.size() * (n + 1) / count};
  };
  for (Index i = 0; i < ulysses; ++i) {
    swap.heads_q.push_back(part_of({0, s.heads_q}, i, ulysses));
    swap.heads_k.push_back(kv_heads(s, swap.heads_q.back()));
  }
  for (Index n = 0; n < head_groups; ++n) {
    HeadGroup& group = swap.head_groups.emplace_back();
    for (const Range& of : swap.heads_q) {
      group.q.push_back(part_of(of, n, head_groups));
      group.k.push_back(kv_heads(s, group.q.back()));
    }
  }
  const auto me = at(s.rank - first);
  for (Index h = swap.heads_q[me].begin; h < swap.heads_q[me].end; ++h)
    swap.head_map.push_back(kv_head(s, h) - swap.heads_k[me].begin);
  s.swap = std::move(swap);
}

void move_queries(Schedule& s, Index query_ranks) {
  s.query_ranks = query_ranks;
  if (s.q_rows == 0) return;  // nothing moves
  const Groups groups(s);
  const Range own{0, s.q_rows};
  for (Index part = 1; part < query_ranks; ++part) {
    const Range theirs{part * s.q_rows, (part + 1) * s.q_rows};
    s.query_moves.push_back({.sends = {{groups.owner(-part), {own}}}, .receives = {{groups.owner(part), {theirs}}}});
  }
  const Plan seen = make_plan(s.problem, s.layouts.q.runs(s.rank), s.layouts.k.rank_order());
  for (const Slice& slice : seen.slices) s.seeing.push_back({slice.q_begin, slice.q_end});
  s.seeing = joined(std::move(s.seeing));
}

StepHeads step_heads(const Schedule& s, const StepDescription& step) {
  const Index heads_q = s.step_heads_q(), heads_k = s.step_heads_k();
  if (step.parts == 1) return {{0, heads_q}, {0, heads_k}};
  if (s.swap) {
    const auto me = at(s.rank - s.swap->group.begin);
    const HeadGroup& group = s.swap->head_groups[at(step.head_part)];
    const auto among = [](Range part, Range all) {
      return part.size() == 0 ? Range{} : Range{part.begin - all.begin, part.end - all.begin};
    };
    return {among(group.q[me], s.swap->heads_q[me]), among(group.k[me], s.swap->heads_k[me])};
  }
  const Range k{heads_k * step.head_part / step.parts, heads_k * (step.head_part + 1) / step.parts};
  const std::vector<Index>& map = s.head_map;
  if (map.empty()) return {{k.begin * (heads_q / heads_k), k.end * (heads_q / heads_k)}, k};
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
  return {count > 0 ? q : Range{}, k};
}

std::vector<Index> swapped_bytes(const Schedule& s, Index head_group, SwapBytes bytes, bool home) {
  const Swap& swap = *s.swap;
  const HeadGroup& group = swap.head_groups[at(head_group)];
  std::vector<Index> all;
  for (Index i = 0; i < swap.group.size(); ++i) {
    const bool keys = home ? swap.ends_keys(head_group, i) : swap.brings_keys(head_group, i);
    all.push_back(s.q_rows * group.q[at(i)].size() * bytes.q + (keys ? s.k_rows * group.k[at(i)].size() * bytes.k : 0));
  }
  return all;
}

bool keys_end(const Swap& swap, Index head_group) {
  for (Index i = 0; i < swap.group.size(); ++i)
    if (swap.ends_keys(head_group, i)) return true;
  return false;
}

void check_shape(const Layouts& layouts, Index heads_q, Index heads_k, const TensorShape& shape) {
  const auto past = [](Index dim) { return dim < 0 || dim > kMaxTokens; };
  // All ranks' rows of queries and keys, forward and backward: fewer than 16 tensors of 8 bytes a number.
  const double rows = static_cast<double>(layouts.q.ranks()) * static_cast<double>(layouts.q.rows() + layouts.k.rows());
  const double heads = static_cast<double>(max_of(heads_q, heads_k));
  if (past(shape.dim_qk) || past(shape.dim_v) || past(shape.source) ||
      rows * heads * static_cast<double>(shape.dim_qk + shape.dim_v + shape.source) >
          static_cast<double>(kUnlimited / 128))
    throw Error(text("bytes of ", rows, " rows, ", heads, " heads and head dims ", shape.dim_qk, " and ", shape.dim_v),
                "give head dims of at least 0, and tensors of at most 2^53 numbers");
}

}  // namespace schedule

bool Swap::brings_keys(Index n, Index member) const {
  return n == 0 || head_groups[at(n)].k[at(member)] != head_groups[at(n - 1)].k[at(member)];
}
bool Swap::ends_keys(Index n, Index member) const {
  return n + 1 == static_cast<Index>(head_groups.size()) || brings_keys(n + 1, member);
}

Index Schedule::step_heads_q() const { return swap ? swap->heads_q[at(rank - swap->group.begin)].size() : heads_q; }
Index Schedule::query_rows() const {
  Index rows = q_rows * ulysses();
  for (const QueryMove& move : query_moves)
    for (const PeerRows& p : move.receives) rows += schedule::rows_in(p.rows);
  return rows;
}
Index Schedule::step_heads_k() const { return swap ? swap->heads_k[at(rank - swap->group.begin)].size() : heads_k; }

Schedule make_schedule(const Problem& problem, const Layouts& layouts, Index rank, const Heads& heads,
                       const ScheduleOptions& options) {
  Schedule s = schedule::unscheduled(problem, layouts, rank, heads, options);
  check_options(options);
  schedule::require_layouts(options, layouts);
  const schedule::Description d = schedule::describe_schedule(options, schedule::shape_of(layouts, heads));
  if (d.ulysses > 0) schedule::swap_heads(s, d.ulysses, schedule::swapped_groups(d));
  if (d.query_ranks > 1) schedule::move_queries(s, d.query_ranks);
  schedule::Builder(s, d).add_steps();
  return s;
}

}  // namespace weft
