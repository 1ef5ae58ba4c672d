// Schedules at hand, a rank each: their own moves and slices.
#include "cost/costs.h"
#include "cost/outline.h"
#include "cost/patterns.h"
#include "index.h"
#include "schedule/build.h"
#include "schedule/source.h"
#include "text.h"
#include "weft/error.h"

namespace weft::cost {
namespace {

void check(std::span<const Schedule> all) {
  if (all.empty()) throw Error("no schedules", "give one for each rank");
  for (std::size_t r = 0; r < all.size(); ++r) {
    const Schedule& s = all[r];
    if (s.ranks != static_cast<Index>(all.size()) || s.rank != static_cast<Index>(r))
      throw Error(text("schedule ", r, " of ", all.size(), " is that of rank ", s.rank, " of ", s.ranks),
                  "give the schedules of all ranks, in their order");
    if (s.steps.size() != all[0].steps.size())
      throw Error(text("rank ", r, " has ", s.steps.size(), " steps and rank 0 ", all[0].steps.size()),
                  "make all schedules from the same problem and options");
  }
}

std::span<const Slice> slices(const Schedule& s, const Step& step) { return s.plans[at(step.plan)].slices; }

// Several computed steps of the same heads, or results of other ranks.
bool partial(const Schedule& s) {
  if (!s.query_moves.empty()) return true;
  std::vector<Range> seen;
  for (const Step& step : s.steps) {
    if (slices(s, step).empty() || step.heads_q.size() == 0) continue;
    for (const Range& other : seen)
      if (other == step.heads_q) return true;
    seen.push_back(step.heads_q);
  }
  return false;
}

bool is_shift(const Schedule& s, std::size_t n) {
  return s.steps[n].move && s.steps[n].move->kind == Move::Kind::shift;
}

Index head_groups(const Schedule& s) { return s.swap ? static_cast<Index>(s.swap->head_groups.size()) : 1; }

// Of the query buffer.
Range parts_of(const Schedule& s, const Step& step) {
  if (s.query_moves.empty() || s.q_rows == 0) return {0, 1};
  return {step.queries.begin / s.q_rows, step.queries.end / s.q_rows};
}

// Rows of a source that the step before brought do not come again.
bool moves(const Schedule& s, std::size_t n, bool source) {
  return s.steps[n].move && !(source && schedule::same_rows_as_before(s, static_cast<Index>(n)));
}

// A source goes to all ranks that have heads in any head group.
Index moved_heads(const Schedule& s, const Step& step, bool source) {
  return source ? min_of(s.step_heads_k(), 1) : step.heads_k.size();
}

std::vector<StepFrame> frames(const Schedule& s, bool source) {
  std::vector<StepFrame> all;
  const Index each = static_cast<Index>(s.steps.size()) / head_groups(s);
  Index turn = 0;
  for (const Step& step : s.steps) {
    const Index number = static_cast<Index>(all.size()) % each;
    const bool moved = moves(s, all.size(), source);
    if (number == 0) turn = 0;
    all.push_back({step.key_rows, step.heads_q.size(), step.heads_k.size(), moved, turn});
    if (moved && step.move->relay) all.back().relay_rows = step.move->relay->rows;
    turn += moved ? 1 : 0;
    all.back().queries = parts_of(s, step);
    all.back().adds_keys = step.again || (!step.move && number > 0);
    all.back().computed = !slices(s, step).empty() && step.heads_q.size() > 0;
  }
  return all;
}

Index expanded_rows(const std::vector<StepFrame>& all) {
  Index rows = 0;
  for (const StepFrame& step : all) rows += step.key_rows * step.heads_k;
  return rows;
}

void add_rows(Outline& o, const Schedule& s, const Frame& frame, const Costs& costs, bool several) {
  for (std::size_t n = 0; n < o.head_groups.size(); ++n) {
    HeadGroupOutline& group = o.head_groups[n];
    Index q = frame.step_heads_q, k = frame.step_heads_k;
    const Index me = s.swap ? s.rank - s.swap->group.begin : 0;
    if (s.swap) {
      q = s.swap->head_groups[n].q[at(me)].size();
      k = s.swap->head_groups[n].k[at(me)].size();
    }
    const bool moves = !s.steps.empty() && s.steps.front().move.has_value();
    const bool brings = costs.source() ? n == 0 : s.swap && s.swap->brings_keys(static_cast<Index>(n), me);
    const bool shares = s.swap && !brings && k > 0;
    group.begin_rows[at(s.rank)] = static_cast<float>(costs.begin_rows(frame, k, moves));
    group.end_rows[at(s.rank)] = static_cast<float>(costs.end_rows(frame, q, k, several && q > 0, shares));
  }
  o.merge_rows[at(s.rank)] = static_cast<float>(costs.merge_rows(frame));
  o.last_rows[at(s.rank)] = static_cast<float>(costs.last_rows(frame));
}

// Kernels, passes over rows and memory of all ranks.
void add_work(Outline& o, std::span<const Schedule> all, const Costs& costs) {
  for (const Schedule& s : all) {
    const Frame frame = frame_of(s);
    const std::vector<StepFrame> shapes = frames(s, costs.source());
    const bool several = partial(s);
    WrittenParts written;
    double pairs = 0;
    for (std::size_t n = 0; n < s.steps.size(); ++n) {
      const Step& step = s.steps[n];
      if (n > 0 && step.head_group != s.steps[n - 1].head_group) written = {};
      if (slices(s, step).empty() || step.heads_q.size() == 0) continue;
      const TileWork work = tile_work(slices(s, step), step.heads_q.size(), step.heads_k.size(), costs.rate());
      o.steps[n].work.push_back(costs.work(s.rank, frame, shapes[n], work, several, !written.adds(shapes[n].queries)));
      pairs += work.pairs;
    }
    o.pairs[at(s.rank)] = static_cast<Index>(pairs);
    add_rows(o, s, frame, costs, several);
    const RankMemory m = costs.memory(frame, shapes, several, expanded_rows(shapes));
    if (m.total() > o.memory.total()) o.memory = m;
  }
}

}  // namespace

Outline outline_of(std::span<const Schedule> all, const TensorShape& shape, const Machine& machine, Pass pass) {
  check(all);
  const Schedule& first = all[0];
  const Costs costs(machine, shape, pass);
  const Patterns make(machine, first.ranks);
  Outline o;
  o.ranks = o.planned = first.ranks;
  o.pairs.assign(all.size(), 0);
  o.steps.resize(first.steps.size());
  const auto add = [&](Pattern p) {
    o.patterns.push_back(std::move(p));
    return static_cast<int>(o.patterns.size()) - 1;
  };
  const bool backward = pass == Pass::backward;

  o.set_head_groups(head_groups(first));
  add_swaps(o, first, costs, pass, [&](const std::vector<double>& bytes, bool back, bool adds) {
    return add(make.swap(first.ulysses(), bytes, back, adds));
  });

  for (std::size_t n = 0; n < first.steps.size(); ++n) {
    if (!moves(first, n, costs.source())) continue;
    const bool shifts = is_shift(first, n), uneven = first.steps[n].move->kind == Move::Kind::send;
    const bool relays = first.steps[n].move->relay.has_value();
    std::vector<Patterns::Sent> there, back, home, enter, leave;
    for (const Schedule& s : all) {
      const Step& step = s.steps[n];
      const auto values = [&](const PeerRows& peer) {
        return static_cast<double>(schedule::rows_in(peer.rows) * moved_heads(s, step, costs.source()));
      };
      const auto both_ways = [&](const PeerRows& peer, auto& to, auto& from) {
        to.push_back({s.rank, peer.peer, values(peer) * costs.kv_bytes()});
        const double gradients = values(peer) * costs.gradient_bytes();
        from.push_back(shifts ? Patterns::Sent{s.rank, peer.peer, gradients}
                              : Patterns::Sent{peer.peer, s.rank, gradients});
      };
      for (const PeerRows& peer : step.move->sends) both_ways(peer, there, back);
      for (const PeerRows& peer : relays ? step.move->relay->passes : std::vector<PeerRows>{})
        both_ways(peer, there, back);
      for (const PeerRows& peer : relays ? step.move->relay->sends : std::vector<PeerRows>{})
        both_ways(peer, enter, leave);
      for (const PeerRows& peer : step.move->home)
        home.push_back({s.rank, peer.peer, values(peer) * costs.gradient_bytes()});
    }
    StepOutline& to = o.steps[n];
    to.shifts = shifts;
    to.kv = add(make.listed(std::move(there), false, uneven));
    if (relays) to.enter = add(make.listed(std::move(enter), false, uneven));
    if (!backward) continue;
    if (relays) to.leave = add(make.listed(std::move(leave), true, uneven));
    if (!shifts || is_shift(first, n - 1)) to.gradients = add(make.listed(std::move(back), true, uneven));
    if (!first.steps[n].move->home.empty()) to.home = add(make.listed(std::move(home), true, false));
  }

  for (std::size_t n = 0; n < first.steps.size(); ++n) {
    o.steps[n].again = first.steps[n].again;
    o.steps[n].queries = parts_of(first, first.steps[n]);
  }
  const schedule::QueryBytes row = costs.query_bytes();
  for (std::size_t m = 0; m < first.query_moves.size(); ++m) {
    std::vector<Patterns::Sent> there, back;
    for (const Schedule& s : all)
      for (const PeerRows& p : s.query_moves[m].sends) {
        const Index rows = schedule::rows_in(p.rows) * s.heads_q;
        there.push_back({s.rank, p.peer, static_cast<double>(rows * row.there)});
        back.push_back({p.peer, s.rank, static_cast<double>(rows * row.back)});
      }
    o.query_moves.push_back(
        {add(make.listed(std::move(there), false, false)), add(make.listed(std::move(back), backward, false))});
  }

  add_work(o, all, costs);
  if (backward ? shape.dsink : shape.max_logit)
    o.numbers = add(make.numbers(static_cast<double>(first.heads_q) * sizeof(double)));
  return o;
}

}  // namespace weft::cost

namespace weft {

RankMemory rank_memory(const Schedule& s, const TensorShape& shape, Pass pass) {
  // Rates are not asked for: any machine will do.
  static const Machine any = [] {
    Machine m;
    for (const Pass p : {Pass::forward, Pass::backward})
      for (const DType d : kDTypes) m.kernels.push_back({.pass = p, .dtype = d, .flops = 1});
    return m;
  }();
  const std::vector<cost::StepFrame> steps = cost::frames(s, shape.source > 0);
  return cost::Costs(any, shape, pass).memory(cost::frame_of(s), steps, cost::partial(s), cost::expanded_rows(steps));
}

}  // namespace weft
