#include "cost/outline_builder.h"

#include <tuple>

namespace weft::cost {

OutlineBuilder::OutlineBuilder(Schedule base, schedule::Description description, const Machine& machine,
                               const TensorShape& shape, Pass pass)
    : pass_(pass), costs_(machine, shape, pass), base_(std::move(base)), description_(std::move(description)) {
  if (description_.ulysses > 0)
    schedule::swap_heads(base_, description_.ulysses, schedule::swapped_groups(description_));
  base_.query_ranks = description_.query_ranks;
  ulysses_ = base_.ulysses();
  spacing_ = ulysses_ * base_.query_ranks;
  groups_ = base_.ranks / spacing_;
  o_.steps.resize(at(steps()));
  meeting_at_.assign(at(groups_), 0);
  std::vector<Index> of_step;
  for (Index n = 0; n < steps(); ++n) {
    const Index same = schedule::step_of_same_keys(description_, n);
    of_step.push_back(same < 0 ? meetings() : of_step[at(same)]);
    if (same < 0) meetings_.emplace_back();
    meetings_[at(of_step.back())].push_back(n);
    by_node_ = by_node_ || step(n).by_node;
    const Index each = step(n).by_node ? node() : 1;
    for (Index d = step(n).distances.begin * each; d < step(n).distances.end * each; ++d)
      if (!step(n).by_node || d > 0) meeting_at_[at(d)] = of_step.back();  // place 0 is the own group's
    parts_ = parts_ || step(n).parts > 1;
    // A step with no more rows and heads than the one two before it needs no more memory: two buffers take turns. Those
    // of the first head group of a swap stand for all.
    const bool more = n < 3 || step(n).move == Move::Kind::send || (step(n).parts > 1 && !base_.swap) ||
                      step(n).distances.size() > step(n - 2).distances.size();
    if ((more && !(base_.swap && step(n).head_part > 0)) || query_ranks() > 1) memory_steps_ = n + 1;
    o_.steps[at(n)].again = step(n).again;
    if (base_.q_rows > 0) o_.steps[at(n)].queries = step(n).queries;
  }
}

OutlineBuilder::Place OutlineBuilder::place(Index n) {
  base_.rank = n;
  Place p{.frame = frame_of(base_), .heads = {}};
  for (Index s = 0; s < (parts_ ? steps() : 1); ++s) {
    const schedule::StepHeads heads = schedule::step_heads(base_, step(s));
    const bool shares =
        base_.swap && (costs_.source() ? step(s).head_part > 0 : !base_.swap->brings_keys(step(s).head_part, n));
    const Index moved = costs_.source() ? min_of(base_.step_heads_k(), 1) : heads.k.size();
    p.heads.push_back({heads.q.size(), heads.k.size(), shares, moved});
  }
  return p;
}

Index OutlineBuilder::met_at(Index group, Index source) const {
  if (!by_node_) return floor_mod(group - source, groups_);
  // The own group, the others of its node, then node after node.
  const Index distance = floor_mod(group / node() - source / node(), groups_ / node());
  if (distance > 0) return distance * node() + source % node();
  return source == group ? 0 : source < group ? source % node() + 1 : source % node();
}

std::vector<Index> OutlineBuilder::key_rows() const {
  std::vector<Index> rows;
  for (Index n = 0; n < steps(); ++n) {
    const Index groups = step(n).distances.size() * (step(n).by_node ? node() : 1);
    rows.push_back(step(n).sequence_order             ? base_.layouts.k.stream().tokens()
                   : step(n).move == Move::Kind::send ? 0
                                                      : group_rows() * groups);
  }
  return rows;
}

int OutlineBuilder::add(Pattern pattern) {
  o_.patterns.push_back(std::move(pattern));
  return static_cast<int>(o_.patterns.size()) - 1;
}

void OutlineBuilder::add_head_groups() {
  o_.set_head_groups(schedule::swapped_groups(description_));
  add_swaps(o_, base_, costs_, pass_,
            [&](const std::vector<double>& bytes, bool back, bool adds) { return add(swap(bytes, back, adds)); });
}

void OutlineBuilder::add_rows(Index rank, const Place& at_place, bool partial) {
  const bool moves = step(0).move.has_value();
  for (HeadGroupOutline& group : o_.head_groups) {
    HeadCounts heads{at_place.frame.step_heads_q, at_place.frame.step_heads_k};
    if (o_.head_groups.size() > 1) heads = at_place.of(group.steps.begin);
    group.begin_rows[at(rank)] = static_cast<float>(costs_.begin_rows(at_place.frame, heads.k, moves));
    group.end_rows[at(rank)] = static_cast<float>(
        costs_.end_rows(at_place.frame, heads.q, heads.k, partial && heads.q > 0, heads.shares && heads.k > 0));
  }
  o_.merge_rows[at(rank)] = static_cast<float>(costs_.merge_rows(at_place.frame));
  o_.last_rows[at(rank)] = static_cast<float>(costs_.last_rows(at_place.frame));
}

void OutlineBuilder::add_moves() {
  const bool backward = pass_ == Pass::backward;
  const schedule::QueryBytes row = costs_.query_bytes();
  for (Index move = 1; move < query_ranks() && base_.q_rows > 0; ++move) {
    const Index rows = base_.q_rows * base_.heads_q;
    o_.query_moves.push_back({add(query_move(move, static_cast<double>(rows * row.there), false)),
                              add(query_move(move, static_cast<double>(rows * row.back), true))});
  }
  for (Index n = 0; n < steps(); ++n) {
    StepOutline& to = o_.steps[at(n)];
    const Range distances = step(n).distances;
    const double kv = costs_.kv_bytes(), gradients = costs_.gradient_bytes();
    if (!moves(n)) continue;
    if (const Index same = alike(n); same >= 0) {
      const StepOutline& other = o_.steps[at(same)];
      std::tie(to.kv, to.gradients, to.enter, to.leave) =
          std::tuple(other.kv, other.gradients, other.enter, other.leave);
      continue;
    }
    if (relays(n)) {
      to.enter = add(enter(n, kv, false));
      if (backward) to.leave = add(enter(n, gradients, true));
    }
    if (step(n).move == Move::Kind::shift) {
      add_shift(n);
    } else if (step(n).move == Move::Kind::send) {
      to.kv = add(send(n, kv, false));
      if (backward) to.gradients = add(send(n, gradients, true));
    } else if (schedule::meets_all(step(n), groups_) || schedule::meets_node(step(n))) {
      to.kv = add(gather(n, kv, false));
      if (backward) to.gradients = add(gather(n, gradients, true));
    } else {
      to.kv = add(shift(n, distances, 1, kv, false));
      if (backward) to.gradients = add(shift(n, way_back(distances), 1, gradients, true));
    }
  }
}

// An earlier step that moves the same rows of as many heads, so that its messages are those of this one: groups of
// heads are equal, and nothing is passed on that came in the step before.
Index OutlineBuilder::alike(Index n) const {
  const Index same = schedule::step_of_same_keys(description_, n);
  const bool equal = !base_.swap && base_.heads_k % step(n).parts == 0;
  return equal && same >= 0 && moves(same) && step(n).move != Move::Kind::shift ? same : -1;
}

void OutlineBuilder::add_shift(Index n) {
  const bool backward = pass_ == Pass::backward;
  StepOutline& to = o_.steps[at(n)];
  to.shifts = true;
  const Range distances = step(n).distances, last = schedule::last_met(description_, n);
  const Index relay = schedule::relay_distance(description_, n);
  if (relay == 0) {
    to.kv = add(shift(n, distances, 1, costs_.kv_bytes(), false));
    shared_ = {};  // of the head group before
  } else {
    if (shared_ != Range{relay, distances.size()}) {
      shared_ = {relay, distances.size()};
      const Range next{relay, relay + 1};
      shared_kv_ = add(shift(n, next, distances.size(), costs_.kv_bytes(), false));
      if (backward) shared_gradients_ = add(shift(n, next, distances.size(), costs_.gradient_bytes(), true));
    }
    to.kv = shared_kv_;
    to.gradients = shared_gradients_;
  }
  if (backward && last.size() > 0) to.home = add(shift(n, way_back(last), 1, costs_.gradient_bytes(), true));
}

double OutlineBuilder::add_mesh_work(Index rank, const Place& at_place, const std::vector<TileWork>& by_step) {
  WrittenParts written;
  std::vector<bool> computed;
  const std::vector<Index> rows = key_rows();
  double pairs = 0;
  for (Index n = 0; n < steps(); ++n) {
    const TileWork& work = by_step[at(n)];
    computed.push_back(work.pairs > 0);
    if (!computed.back()) continue;
    const StepFrame shape{.key_rows = rows[at(n)],
                          .heads_q = at_place.of(n).q,
                          .heads_k = at_place.of(n).k,
                          .queries = step(n).queries,
                          .adds_keys = n > 0 && !step(n).move};
    const bool first = !written.adds(shape.queries);
    o_.steps[at(n)].work.push_back(costs_.work(rank, at_place.frame, shape, work, true, first));
    pairs += work.pairs;
  }
  add_memory(at_place, rows, true, {}, computed);
  return pairs;
}

Index OutlineBuilder::mesh_step(Index part, Index distance) const {
  for (Index n = 0; n < steps(); ++n) {
    const Range parts = step(n).queries, met = step(n).distances;
    if (parts.begin <= part && part < parts.end && met.begin <= distance && distance < met.end) return n;
  }
  return 0;  // no such description
}

void OutlineBuilder::add_memory(const Place& at_place, const std::vector<Index>& rows, bool partial,
                                const std::vector<Index>& relayed, const std::vector<bool>& computed) {
  std::vector<StepFrame> frames;
  for (Index n = 0, turn = 0; n < memory_steps_; turn += moves(n) ? 1 : 0, ++n) {
    const Index heads_k = base_.swap ? at_place.frame.group_heads_k : at_place.of(n).k;
    frames.push_back({rows[at(n)], at_place.of(n).q, heads_k, moves(n), turn});
    if (relays(n)) frames.back().relay_rows = relayed[at(n)];
    frames.back().queries = step(n).queries;
    frames.back().computed = computed.empty() || computed[at(n)];
  }
  Index expanded = 0;
  for (Index n = 0; n < static_cast<Index>(rows.size()); ++n) expanded += rows[at(n)] * at_place.of(n).k;
  const RankMemory m = costs_.memory(at_place.frame, frames, partial && at_place.frame.step_heads_q > 0, expanded);
  if (m.total() > o_.memory.total()) o_.memory = m;
}

}  // namespace weft::cost
