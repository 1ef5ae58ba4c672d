// The quick estimate: the outline of a schedule on the samples of a sketch, with their own loads and works, and peers
// that do as the samples do.
#include <algorithm>
#include <map>

#include "cost/engine.h"
#include "cost/outline_builder.h"
#include "cost/patterns.h"
#include "cost/sketch.h"

namespace weft::cost {
class Estimate : private OutlineBuilder {
 public:
  Estimate(const Sketch& sketch, Schedule base, const ScheduleOptions& options, Pass pass)
      : OutlineBuilder(std::move(base), schedule::describe_schedule(options, sketch.shape_), sketch.machine_,
                       sketch.layer_.shape, pass),
        s_(sketch),
        topology_(sketch.machine_),
        count_(static_cast<Index>(sketch.samples_.size())),
        sends_(at(steps())) {
    o_.ranks = o_.planned = count_;
    o_.pairs.assign(at(count_), 0);
    for (Index n = 0; n < count_; ++n) places_.push_back(place(rank(n) % ulysses_));
    for (Index n = 0; n < steps(); ++n)
      if (step(n).move == Move::Kind::send) sends_[at(n)] = Sends(at(count_));
  }

  Sketch::Result run() {
    add_head_groups();
    for (Index n = 0; n < count_; ++n) add_sample(n);
    add_moves();
    Timeline t;
    Record record(o_, {}, t);
    run_in_step(o_, s_.machine_, pass_, {}, record);
    return {t.seconds, o_.memory.total()};
  }

 private:
  // A step that moves what is seen, by sample.
  struct Sends {
    explicit Sends(std::size_t samples = 0)
        : there(samples), back(samples), enter(samples), leave(samples), senders(samples) {}
    std::vector<Load> there, back;
    std::vector<Load> enter, leave;           // of other nodes, in two hops
    std::vector<std::vector<Index>> senders;  // samples that stand for those who send
    Index relayed = 0;                        // rows of the relay buffer of the sample at hand
  };

  const Sketch::Sample& sample(Index n) const { return s_.samples_[at(n)]; }
  Index rank(Index n) const { return sample(n).rank; }
  std::size_t which() const { return pass_ == Pass::forward ? 0 : 1; }

  // Neighbours do the same over the same link, unless it is known how many of them do.
  Pattern finished(Pattern p, bool up_is_known = false) const {
    for (Load& load : p.loads) {
      for (std::size_t l = 0; l < topology_.levels() && !up_is_known; ++l)
        load.up[l] = std::max(load.up[l], std::max(load.in[l], load.out[l]) * static_cast<double>(topology_.below(l)));
      p.seconds.push_back(topology_.seconds(load));
      p.interference.push_back(topology_.interference(load));
    }
    return p;
  }
  Pattern together() const {
    Pattern p{.peers = Pattern::Peers::block, .size = count_};
    p.loads.resize(at(count_));
    return p;
  }
  // Sample n gets from these samples.
  Pattern listed(const std::vector<std::vector<Index>>& from) const {
    std::vector<Patterns::Sent> messages;
    for (Index n = 0; n < count_; ++n)
      for (const Index sender : from[at(n)]) messages.push_back({sender, n, 1});
    Pattern p = Patterns(s_.machine_, count_).listed(std::move(messages), false, false);
    p.loads.assign(at(count_), {});  // real ones follow
    p.seconds.clear();
    p.interference.clear();
    return p;
  }
  // The sample that stands for a rank.
  Index nearest(Index rank) const {
    const auto& all = s_.samples_;
    const auto after =
        std::lower_bound(all.begin(), all.end(), rank, [](const Sketch::Sample& s, Index r) { return s.rank < r; });
    if (after == all.end()) return count_ - 1;
    if (after == all.begin() || after->rank - rank < rank - (after - 1)->rank) return after - all.begin();
    return after - all.begin() - 1;
  }

  Pattern swap(const std::vector<double>& bytes, bool back, bool adds) const override {
    Pattern p = together();
    for (Index n = 0; n < count_; ++n) {
      const Index me = rank(n), begin = me / ulysses_ * ulysses_;
      const double mine = bytes[at(me - begin)];
      for (Index peer = begin; peer < begin + ulysses_; ++peer) {
        const double theirs = bytes[at(peer - begin)], in = back ? theirs : mine;
        p.loads[at(n)].copied += adds ? 2 * in : in;
        if (peer == me) continue;
        topology_.receive(p.loads[at(n)], me, peer, in);
        topology_.send(p.loads[at(n)], me, peer, back ? mine : theirs);
      }
    }
    return finished(std::move(p));
  }

  Pattern gather(Index step, double each, bool back) const override {
    Pattern p = together();
    for (Index n = 0; n < count_; ++n) {
      const double held = static_cast<double>(group_rows() * places_[at(n)].of(step).moved) * each;
      if (!relays()) {
        p.loads[at(n)] = Patterns(s_.machine_, ranks()).gather_load(rank(n), ulysses_, held, back);
        continue;
      }
      // By each rank of the node.
      const double passed =
          schedule::meets_node(this->step(step)) ? held : held * static_cast<double>(groups_ / node());
      const Index first = rank(n) / node_ranks() * node_ranks() + rank(n) % ulysses_;
      for (Index mate = first; mate < first + node_ranks(); mate += ulysses_) {
        p.loads[at(n)].copied += back ? 2 * passed : passed;
        if (mate == rank(n)) continue;
        topology_.receive(p.loads[at(n)], rank(n), mate, passed);
        topology_.send(p.loads[at(n)], rank(n), mate, passed);
      }
    }
    return finished(std::move(p));
  }

  Pattern enter(Index step, double each, bool back) const override {
    if (this->step(step).move == Move::Kind::send) {
      const Sends& sends = sends_[at(step)];
      Pattern p = listed(sends.senders);
      p.loads = back ? sends.leave : sends.enter;
      return finished(std::move(p));
    }
    Pattern p = together();
    for (Index n = 0; n < count_; ++n) {
      const double held = static_cast<double>(group_rows() * places_[at(n)].of(step).moved) * each;
      if (!schedule::meets_node(this->step(step))) {
        p.loads[at(n)] = Patterns(s_.machine_, ranks()).gather_load(rank(n), node_ranks(), held, back);
        continue;
      }
      const Index far = this->step(step).distances.begin * node_ranks();
      topology_.receive(p.loads[at(n)], rank(n), floor_mod(rank(n) - far, ranks()), held);
      topology_.send(p.loads[at(n)], rank(n), floor_mod(rank(n) + far, ranks()), held);
      p.loads[at(n)].copied = back ? 2 * held : held;
    }
    return finished(std::move(p));
  }
  Index node_ranks() const { return node() * ulysses_; }

  Pattern shift(Index step, Range distances, Index groups, double each, bool adds) override {
    std::vector<std::vector<Index>> before(at(count_));
    for (Index n = 0; n < count_ && count_ > 1; ++n) before[at(n)] = {(n + count_ - 1) % count_};
    Pattern p = listed(before);
    const std::size_t far = topology_.level(0, ranks() - 1);
    double crossing = 0;  // messages of a node that leave it
    for (Index d = distances.begin; d < distances.end; ++d)
      crossing += static_cast<double>(min_of(d * spacing_, topology_.below(far)));
    for (Index n = 0; n < count_; ++n) {
      const double message = static_cast<double>(groups * group_rows() * places_[at(n)].of(step).moved) * each;
      const double bytes = message * static_cast<double>(distances.size());
      Load& load = p.loads[at(n)];
      // All wait for the slowest link between such peers, sooner or later.
      load.in[far] = load.out[far] = bytes;
      load.messages[far] = distances.size();
      load.up[far] = message * crossing;
      load.bytes_in = load.bytes_out = static_cast<Index>(bytes);
      load.copied = adds ? 2 * bytes : bytes;
    }
    return finished(std::move(p), true);
  }

  Pattern query_move(Index places, double bytes, bool back) const override {
    std::vector<std::vector<Index>> before(at(count_));
    for (Index n = 0; n < count_ && count_ > 1; ++n) before[at(n)] = {(n + count_ - 1) % count_};
    Pattern p = listed(before);
    for (Index n = 0; n < count_; ++n) {
      const Index from = query_owner(rank(n), places), to = query_owner(rank(n), -places);
      topology_.receive(p.loads[at(n)], rank(n), back ? to : from, bytes);
      topology_.send(p.loads[at(n)], rank(n), back ? from : to, bytes);
      p.loads[at(n)].copied = back && pass_ == Pass::backward ? 2 * bytes : bytes;
    }
    return finished(std::move(p));
  }

  Pattern send(Index step, double, bool back) const override {
    const Sends& sends = sends_[at(step)];
    Pattern p = listed(sends.senders);
    p.loads = back ? sends.back : sends.there;
    return finished(std::move(p));
  }

  // All that a group's queries see, as a multiple of what the sample's own see: in the ratio of their pairs.
  double group_over_own(Index n) const {
    if (!base_.swap) return 1;
    if (s_.pairs_.empty()) return static_cast<double>(ulysses_);
    const Index begin = rank(n) / ulysses_ * ulysses_;
    double sum = 0;
    for (Index r = begin; r < begin + ulysses_; ++r) sum += s_.pairs_[at(r)];
    return sum / std::max(1.0, s_.pairs_[at(rank(n))]);
  }

  // What the samples see together, extrapolated to all ranks in the ratio of pairs.
  TileWork of_all_ranks() const {
    TileWork all;
    double pairs = 0, whole = 0;
    for (Index n = 0; n < count_; ++n) {
      for (const Sketch::Cell& c : sample(n).cells) all += c.work[which()];
      pairs += s_.pairs_.empty() ? 1 : s_.pairs_[at(rank(n))];
    }
    for (Index r = 0; r < ranks(); ++r) whole += s_.pairs_.empty() ? 1 : s_.pairs_[at(r)];
    return times(all, whole / std::max(1.0, pairs));
  }

  // What the group's queries see in each meeting, for one K/V head.
  std::vector<TileWork> seen_by_group(Index n) const {
    std::vector<TileWork> work(at(meetings()));
    if (groups_ == 1 && base_.swap) {
      work[0] = of_all_ranks();
      return work;
    }
    if (step(0).sequence_order)
      work[0] = sample(n).in_sequence[which()];
    else
      for (const Sketch::Cell& c : sample(n).cells) work[at(meeting_of(rank(n), c.source))] += c.work[which()];
    for (TileWork& w : work) w = times(w, group_over_own(n));
    return work;
  }
  Index meeting_of(Index rank, Index source) const { return meeting_at(met_at(rank / ulysses_, source / ulysses_)); }

  // The other ranks of its group are taken to see what the sample sees, and keys at all places to be alike.
  void add_mesh_sample(Index n) {
    const Place& p = places_[at(n)];
    std::vector<TileWork> of_group(at(groups_)), by_step(at(steps()));  // by distance
    for (const Sketch::Cell& c : sample(n).cells)
      of_group[at(floor_mod(rank(n) / spacing_ - c.source / spacing_, groups_))] += c.work[which()];
    const double group = static_cast<double>(max_of(1, s_.layer_.heads_q / max_of(1, s_.layer_.heads_k)));
    const double heads = static_cast<double>(p.of(0).q) / group;
    for (Index m = 0; m < steps(); ++m)
      for (Index d = step(m).distances.begin; d < step(m).distances.end; ++d)
        by_step[at(m)] +=
            times(of_group[at(d)], heads * static_cast<double>(step(m).queries.size()) / static_cast<double>(spacing_));
    add_mesh_work(n, p, by_step);
    add_rows(n, p, true);
  }

  void add_sample(Index n) {
    if (query_ranks() > 1) return add_mesh_sample(n);
    const Place& p = places_[at(n)];
    std::vector<Index> rows = key_rows();
    add_touched(n, rows);
    const std::vector<TileWork> work = seen_by_group(n);
    std::vector<Index> met;
    for (Index m = 0; m < meetings(); ++m)
      if (work[at(m)].pairs > 0) met.push_back(m);
    const double group = static_cast<double>(max_of(1, s_.layer_.heads_q / max_of(1, s_.layer_.heads_k)));
    add_work(n, p, met, rows, met.size() > 1, [&](std::size_t i, const HeadCounts& heads) {
      return times(work[at(met[i])], static_cast<double>(heads.q) / group);
    });
    // The others of a group see keys of other steps too.
    const bool partial = (met.size() > 1 || (ulysses_ > 1 && meetings() > 1)) && p.frame.step_heads_q > 0;
    add_rows(n, p, partial);
    std::vector<Index> relayed;
    for (Index m = 0; m < steps(); ++m)
      relayed.push_back(step(m).move == Move::Kind::send ? sends_[at(m)].relayed
                        : schedule::meets_node(step(m))  ? group_rows()
                                                         : (groups_ / node() - 1) * group_rows());
    add_memory(p, rows, partial, relayed);
  }

  // Rows that the sample sends and gets in steps that move only what is seen. Steps that meet the same keys move the
  // same rows, each of its own heads.
  void add_touched(Index n, std::vector<Index>& rows) {
    for (Sends& sends : sends_) sends.relayed = 0;
    for (const Sketch::Cell& c : sample(n).cells) {
      for_each_send(n, meeting_of(rank(n), c.source), [&](Index step, double heads) {
        rows[at(step)] += c.touched;
        add_seen(n, c, static_cast<double>(c.touched) * heads, sends_[at(step)]);
      });
    }
    std::map<Index, Index> to_nodes;  // rows by node
    for (const Sketch::Sent& sent : sample(n).sent) {
      if (relays() && rank(n) / node() != sent.to / node()) {
        Index& most = to_nodes[sent.to / node()];
        most = max_of(most, sent.rows);
        continue;
      }
      for_each_send(n, meeting_of(sent.to, rank(n)), [&](Index step, double heads) {
        Sends& sends = sends_[at(step)];
        add_sent(n, sent.to, static_cast<double>(sent.rows) * heads, sends.there[at(n)], sends.back[at(n)]);
      });
    }
    for (const auto& [to, rows_sent] : to_nodes) {
      const Index peer = to * node() + rank(n) % node();
      for_each_send(n, meeting_of(peer, rank(n)), [&, sent = rows_sent](Index step, double heads) {
        Sends& sends = sends_[at(step)];
        add_sent(n, peer, static_cast<double>(sent) * heads, sends.enter[at(n)], sends.leave[at(n)]);
      });
    }
  }

  // add(step, K/V heads that move) of each step of a meeting that moves what is seen.
  template <class Add>
  void for_each_send(Index n, Index meeting, const Add& add) const {
    for (const Index m : steps_of(meeting))
      if (step(m).move == Move::Kind::send) add(m, static_cast<double>(places_[at(n)].of(m).moved));
  }

  // The sample gets `values`, rows times heads, and sends their gradients back.
  void add_seen(Index n, const Sketch::Cell& c, double values, Sends& sends) {
    if (c.source == rank(n)) {
      sends.there[at(n)].copied += values * costs_.kv_bytes();
      sends.back[at(n)].copied += 2 * values * costs_.gradient_bytes();
      return;
    }
    if (relays() && rank(n) / node() != c.source / node()) {
      add_relayed(n, c.source, values, sends);
      sends.relayed += c.touched / node();
      return;
    }
    topology_.receive(sends.there[at(n)], rank(n), c.source, values * costs_.kv_bytes());
    sends.there[at(n)].copied += values * costs_.kv_bytes();
    topology_.send(sends.back[at(n)], rank(n), c.source, values * costs_.gradient_bytes());
    std::vector<Index>& from = sends.senders[at(n)];
    const Index sender = nearest(c.source);
    if (sender != n && std::find(from.begin(), from.end(), sender) == from.end()) from.push_back(sender);
  }

  // The sample sends `values` and gets their gradients.
  void add_sent(Index n, Index peer, double values, Load& there, Load& back) {
    const double gradients = values * costs_.gradient_bytes();
    topology_.send(there, rank(n), peer, values * costs_.kv_bytes());
    topology_.receive(back, rank(n), peer, gradients);
    back.copied += 2 * gradients;
  }

  // Rows of another node, passed on by the rank at the source's place. The others of the node see about the same rows,
  // so that the sample brings its share of them into the node, and passes on as much as it gets.
  void add_relayed(Index n, Index source, double values, Sends& sends) {
    const double kv = values * costs_.kv_bytes(), gradients = values * costs_.gradient_bytes();
    const double share = 1 / static_cast<double>(node());
    const Index peer = source / node() * node() + rank(n) % node();
    topology_.receive(sends.enter[at(n)], rank(n), peer, kv * share);
    topology_.send(sends.leave[at(n)], rank(n), peer, gradients * share);
    sends.enter[at(n)].copied += kv * share;
    sends.there[at(n)].copied += kv;
    sends.back[at(n)].copied += 2 * gradients;
    const Index mate = rank(n) / node() * node() + source % node();
    if (mate == rank(n)) return;
    topology_.receive(sends.there[at(n)], rank(n), mate, kv);
    topology_.send(sends.there[at(n)], rank(n), mate, kv);
    topology_.receive(sends.back[at(n)], rank(n), mate, gradients);
    topology_.send(sends.back[at(n)], rank(n), mate, gradients);
  }

  const Sketch& s_;
  Topology topology_;
  Index count_;
  std::vector<Place> places_;  // by sample
  std::vector<Sends> sends_;   // by step
};

Sketch::Result Sketch::estimate(const ScheduleOptions& options, Pass pass) const {
  check_options(options);
  schedule::require_layouts(options, layouts_, layer_.shape.source > 0);
  return Estimate(*this, base_, options, pass).run();
}

double Sketch::at_least(const ScheduleOptions& options, Pass pass) const {
  const schedule::Description d = schedule::describe_schedule(options, shape_);
  const Costs costs(machine_, layer_.shape, pass);
  const Topology topology(machine_);
  const Index ulysses = max_of(1, d.ulysses);
  const Index heads = costs.moved_heads(max_of(1, layer_.heads_k / ulysses));
  const double values = static_cast<double>(layouts_.k.rows() * ulysses * heads);
  // Head groups have at least so many of the heads each.
  const double part = static_cast<double>(heads / schedule::swapped_groups(d)) / static_cast<double>(heads);
  const bool gathers = d.query_ranks == 1 && !d.steps.empty() && d.steps.back().move == Move::Kind::gather;
  double sum = 0;
  const schedule::QueryBytes row = costs.query_bytes();
  for (Index places = 1; places < d.query_ranks; ++places) {
    const double rows = static_cast<double>(layouts_.q.rows() * layer_.heads_q);
    for (const Index each : {row.there, row.back}) {
      Load load;
      topology.receive(load, 0, places, rows * static_cast<double>(each));
      sum += topology.seconds(load);
    }
  }
  for (const double each : {costs.kv_bytes(), pass == Pass::backward ? costs.gradient_bytes() : 0.0}) {
    if (each == 0) continue;
    // Each row comes once, in whichever step.
    if (gathers) {  // in two hops, the first alone
      Load load = Patterns(machine_, ranks_).gather_load(0, ulysses * d.node, values * each, false);
      for (std::size_t l = 0; l < topology.levels(); ++l)
        load.up[l] = load.in[l] * static_cast<double>(topology.below(l));
      sum += topology.seconds(load);
    }
    for (const schedule::StepDescription& step : d.steps) {
      if (step.move != Move::Kind::shift && (d.query_ranks == 1 || !step.move)) continue;
      Load load;
      const std::size_t far = topology.level(0, ranks_ - 1);
      load.messages[far] = 1;
      load.in[far] = values * part * each * static_cast<double>(step.distances.size());
      sum += topology.seconds(load);
    }
  }
  return sum;
}

double Sketch::listed_steps(const ScheduleOptions& options) const {
  const schedule::Description d = schedule::describe_schedule(options, shape_);
  double steps = 0;
  for (const schedule::StepDescription& step : d.steps)
    if (step.move && step.move != Move::Kind::send &&
        (d.node > 1 || !schedule::meets_all(step, ranks_ / max_of(1, d.ulysses))))
      ++steps;
  steps += 2 * static_cast<double>(d.query_ranks - 1);
  return steps * static_cast<double>(ranks_);
}

}  // namespace weft::cost
