#include "cost/sketch.h"

#include <algorithm>

#include "cost/engine.h"
#include "cost/ring_moves.h"
#include "index.h"
#include "plan/layout_data.h"
#include "plan/plan_subset.h"
#include "schedule/schedules.h"
#include "text.h"
#include "weft/error.h"
#include "weft/support.h"

namespace weft::cost {
namespace {

constexpr Index kSamples = 8;

// The rank whose keys are seen most: it has most to send. The same count with queries and keys changed about.
Index most_wanted(std::vector<Slice> turned, const Layout& k, const RunList& keys) {
  for (Slice& s : turned) s = {s.k_begin, s.k_end, s.q_begin, s.q_end, -s.hi, -s.lo};
  const std::vector<Index> pairs = pairs_by_rank(turned, k, keys);
  return std::max_element(pairs.begin(), pairs.end()) - pairs.begin();
}

// Evenly spread, the busiest, and the one that sends most.
std::vector<Index> sampled_ranks(std::vector<Slice> slices, const Layout& k, const RunList& keys,
                                 const std::vector<double>& pairs) {
  const Index ranks = k.ranks();
  std::vector<Index> chosen;
  for (Index n = 0; n < min_of(kSamples, ranks); ++n)
    chosen.push_back(ranks <= kSamples ? n : n * (ranks - 1) / (kSamples - 1));
  if (ranks > kSamples && !pairs.empty()) {
    chosen.push_back(std::max_element(pairs.begin(), pairs.end()) - pairs.begin());
    chosen.push_back(most_wanted(std::move(slices), k, keys));
  }
  std::sort(chosen.begin(), chosen.end());
  chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  return chosen;
}

TileWork times(TileWork unit, double n) {
  unit.pairs *= n;
  unit.covered *= n;
  unit.tiles *= n;
  unit.rows *= n;
  return unit;
}

}  // namespace

Sketch::Sketch(const Layer& layer, const Layouts& layouts, const Machine& machine)
    : layer_(layer),
      layouts_(layouts),
      machine_(machine),
      ranks_(layouts.q.ranks()),
      stride_(layouts.k.runs(0).stride()),
      base_(schedule::begin(layer.problem, layouts, 0, {layer.heads_q, layer.heads_k}, {.kind = ScheduleKind::exact})) {
  const Index group = max_of(1, layer.heads_q / max_of(1, layer.heads_k)), rows = max_of(1, layouts.k.rows());
  std::vector<TileCounter> counters;
  for (const Pass pass : {Pass::forward, Pass::backward})
    if (pass == Pass::forward || layer.backward)
      counters.emplace_back(group, 1, kernel_rate(machine, pass, layer.shape));
  const auto take = [&](TileWork* to) {
    for (std::size_t n = 0; n < counters.size(); ++n) to[n] = counters[n].take();
  };
  const RunList keys = layouts.k.rank_order();
  const bool alike = layouts.q.runs(0).source().owner == layouts.k.runs(0).source().owner;
  const RunList queries = alike ? keys : layouts.q.rank_order();
  std::vector<Slice> slices = layer.problem.global_slices();
  // Layouts that cut each sequence are even by themselves.
  if (layouts.q.kind() != LayoutKind::dual_chunk && layouts.q.kind() != LayoutKind::striped)
    for (const Index n : pairs_by_rank(slices, layouts.q, queries)) pairs_.push_back(static_cast<double>(n));
  const Stream &q_stream = layer.problem.packing().q(), &k_stream = layer.problem.packing().k();
  for (const Index rank : sampled_ranks(std::move(slices), layouts.k, keys, pairs_)) {
    Sample sample{.rank = rank, .cells = {}, .in_sequence = {}, .sent = {}};
    const RunList own = layouts.q.runs(rank), own_keys = layouts.k.runs(rank);
    const std::vector<Index> seen_in = sequences_in(q_stream, own);
    Plan plan = make_plan(layer.problem, own, keys, seen_in);
    slices_ += static_cast<double>(plan.slices.size());
    std::sort(plan.slices.begin(), plan.slices.end(),
              [](const Slice& a, const Slice& b) { return a.k_begin < b.k_begin; });
    Index touched = 0, end = 0;
    for (std::size_t n = 0; n < plan.slices.size(); ++n) {
      const Slice& s = plan.slices[n];
      for (TileCounter& c : counters) c.add_roughly(s);
      const Range seen = touched_keys(s);
      touched += max_of(0, seen.end - max_of(end, seen.begin));
      end = max_of(end, seen.end);
      const Index source = s.k_begin / rows;
      if (n + 1 < plan.slices.size() && plan.slices[n + 1].k_begin / rows == source) continue;
      sample.cells.push_back({.source = source, .work = {}, .touched = touched});
      take(sample.cells.back().work);
      touched = 0;
    }
    if (stride_ == 1) {
      for (const Slice& s : make_plan(layer.problem, own, layouts.k.sequence_order(), seen_in).slices)
        for (TileCounter& c : counters) c.add_roughly(s);
      take(sample.in_sequence);
    }
    // Who wants the rank's own keys, and how many: the first keys of a long document go to many.
    Plan wanted = make_plan(layer.problem, queries, own_keys, sequences_in(k_stream, own_keys));
    const Index q_rows = max_of(1, layouts.q.rows());
    std::sort(wanted.slices.begin(), wanted.slices.end(), [&](const Slice& a, const Slice& b) {
      return std::pair(a.q_begin / q_rows, a.k_begin) < std::pair(b.q_begin / q_rows, b.k_begin);
    });
    Index last = -1;
    for (const Slice& s : wanted.slices) {
      const Index to = s.q_begin / q_rows;
      if (to == rank) continue;
      if (to != last) {
        sample.sent.push_back({to, 0});
        end = 0;
        last = to;
      }
      const Range seen = touched_keys(s);
      sample.sent.back().rows += max_of(0, seen.end - max_of(end, seen.begin));
      end = max_of(end, seen.end);
    }
    samples_.push_back(std::move(sample));
  }
  slices_ *= static_cast<double>(ranks_) / static_cast<double>(max_of(1, static_cast<Index>(samples_.size())));
}

// The outline of a schedule on the samples: real loads and works, peers that do as the samples do.
class Mini {
 public:
  Mini(const Sketch& sketch, const ScheduleOptions& options, Pass pass)
      : s_(sketch),
        pass_(pass),
        options_(options),
        costs_(sketch.machine_, sketch.layer_.shape, pass),
        topology_(sketch.machine_),
        count_(static_cast<Index>(sketch.samples_.size())) {
    first_ = made(options);
    inside_ = first_->ranks_inside();
    kind_ = options.kind == ScheduleKind::hybrid ? options.across : options.kind;
    if (kind_ == ScheduleKind::all_gather) schedule::check_head_groups(*first_);
    o_.ranks = o_.planned = count_;
    o_.pairs.assign(at(count_), 0);
  }

  Sketch::Result run() {
    for (Index n = 0; n < count_; ++n) frames_.push_back(frame(rank(n)));
    if (first_->swap) add_swaps();
    switch (kind_) {
      case ScheduleKind::all_gather:
        add_gathers();
        break;
      case ScheduleKind::ring:
        add_ring();
        break;
      case ScheduleKind::exact:
        add_exact();
        break;
      case ScheduleKind::all_to_all:
        add_stay();
        break;
      case ScheduleKind::hybrid:  // kind_ is what it has across
        break;
    }
    Timeline t;
    Record record(o_, {}, t);
    run_in_step(o_, s_.machine_, pass_, {}, record);
    return {t.seconds, memory_};
  }

 private:
  // As schedule::begin, without asking the layouts again and again.
  Schedule made(const ScheduleOptions& options) const {
    schedule::check_options(options);
    Schedule s = s_.base_;
    s.options = options;
    require_support(
        {.schedule = options.kind, .key_order = options.key_order, .stride_q = s_.stride_, .stride_k = s_.stride_});
    if (options.kind == ScheduleKind::all_to_all) schedule::swap_heads(s, s.ranks);
    if (options.kind == ScheduleKind::hybrid) {
      schedule::check_mesh(s);
      schedule::swap_heads(s, options.inside);
    }
    return s;
  }

  const Sketch::Sample& sample(Index n) const { return s_.samples_[at(n)]; }
  Index rank(Index n) const { return sample(n).rank; }
  Index groups() const { return s_.ranks_ / inside_; }
  std::size_t which() const { return pass_ == Pass::forward ? 0 : 1; }

  Frame frame(Index rank) const {
    Frame f = frame_of(*first_);
    if (first_->swap) {
      f.step_heads_q = first_->swap->heads_q[at(rank % inside_)].size();
      f.step_heads_k = first_->swap->heads_k[at(rank % inside_)].size();
    }
    return f;
  }

  // Neighbours do the same over the same link, unless it is known how many of them do.
  int add(Pattern p, bool up_is_known = false) {
    for (Load& load : p.loads) {
      for (std::size_t l = 0; l < topology_.levels() && !up_is_known; ++l)
        load.up[l] = std::max(load.up[l], std::max(load.in[l], load.out[l]) * static_cast<double>(topology_.below(l)));
      p.seconds.push_back(topology_.seconds(load));
      p.interference.push_back(topology_.interference(load));
    }
    o_.patterns.push_back(std::move(p));
    return static_cast<int>(o_.patterns.size()) - 1;
  }
  Pattern together() const {
    Pattern p{.peers = Pattern::Peers::block, .size = count_};
    p.loads.resize(at(count_));
    return p;
  }
  // Sample n gets from these samples.
  Pattern listed(const std::vector<std::vector<Index>>& from) const {
    Pattern p{.peers = Pattern::Peers::listed};
    p.loads.resize(at(count_));
    std::vector<std::vector<Index>> to(at(count_));
    p.from_begin.assign(1, 0);
    p.to_begin.assign(1, 0);
    for (Index n = 0; n < count_; ++n) {
      for (const Index sender : from[at(n)]) {
        p.from.push_back(static_cast<std::uint32_t>(sender));
        p.from_bytes.push_back(0);
        to[at(sender)].push_back(n);
      }
      p.from_begin.push_back(p.from.size());
    }
    for (const std::vector<Index>& receivers : to) {
      for (const Index n : receivers) p.to.push_back(static_cast<std::uint32_t>(n));
      p.to_begin.push_back(p.to.size());
    }
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

  void add_swaps() {
    const Layouts& l = s_.layouts_;
    const auto swap = [&](const Costs::SwapBytes& of, bool back, bool adds) {
      Pattern p = together();
      for (Index n = 0; n < count_; ++n) {
        const Index me = rank(n), begin = me / inside_ * inside_;
        const auto bytes = [&](Index member) {
          return static_cast<double>(l.q.rows() * first_->swap->heads_q[at(member)].size() * of.q +
                                     l.k.rows() * first_->swap->heads_k[at(member)].size() * of.k);
        };
        const double mine = bytes(me - begin);
        for (Index peer = begin; peer < begin + inside_; ++peer) {
          const double theirs = bytes(peer - begin), in = back ? theirs : mine;
          p.loads[at(n)].copied += adds ? 2 * in : in;
          if (peer == me) continue;
          topology_.receive(p.loads[at(n)], me, peer, in);
          topology_.send(p.loads[at(n)], me, peer, back ? mine : theirs);
        }
      }
      return add(std::move(p));
    };
    o_.swap_in = swap(costs_.swap_in(), false, false);
    o_.swap_out = swap(costs_.swap_out(), true, false);
    if (pass_ == Pass::backward) o_.swap_home = swap({0, static_cast<Index>(costs_.gradient_bytes())}, true, true);
  }

  Index key_rows() const { return s_.layouts_.k.rows() * inside_; }

  // All that a group's queries see, as what the sample's own see: in the ratio of their pairs.
  double group_over_own(Index n) const {
    if (!first_->swap) return 1;
    if (s_.pairs_.empty()) return static_cast<double>(inside_);
    const Index begin = rank(n) / inside_ * inside_;
    double sum = 0;
    for (Index r = begin; r < begin + inside_; ++r) sum += s_.pairs_[at(r)];
    return sum / std::max(1.0, s_.pairs_[at(rank(n))]);
  }
  TileWork scaled(const TileWork& unit, Index n, Index heads_q) const {
    const Index group = max_of(1, s_.layer_.heads_q / max_of(1, s_.layer_.heads_k));
    return times(unit, group_over_own(n) * static_cast<double>(heads_q) / static_cast<double>(group));
  }

  void add_work(Index n, Index step, Index rows, const TileWork& unit, Index heads_q, Index heads_k, bool partial,
                bool first) {
    if (unit.pairs == 0 || heads_q == 0) return;
    const Frame& f = frames_[at(n)];
    const StepFrame shape{.key_rows = rows, .heads_q = heads_q, .heads_k = heads_k};
    o_.steps[at(step)].work.push_back(costs_.work(n, f, shape, scaled(unit, n, heads_q), partial, first));
  }

  void end(Index n, std::span<const StepFrame> steps, bool partial) {
    const Frame& f = frames_[at(n)];
    o_.begin_rows.push_back(static_cast<float>(costs_.begin_rows(f, !steps.empty() && steps[0].moves)));
    o_.end_rows.push_back(static_cast<float>(costs_.end_rows(f, partial)));
    memory_ = max_of(memory_, costs_.memory(f, steps, partial).total());
  }

  void add_stay() {
    o_.steps.resize(1);
    // Every rank has all queries of its heads: as much as the samples together, in the ratio of pairs.
    TileWork all;
    double pairs = 0, whole = 0;
    for (Index n = 0; n < count_; ++n) {
      for (const Sketch::Cell& c : sample(n).cells) all += c.work[which()];
      pairs += s_.pairs_.empty() ? 1 : s_.pairs_[at(rank(n))];
    }
    for (Index r = 0; r < s_.ranks_; ++r) whole += s_.pairs_.empty() ? 1 : s_.pairs_[at(r)];
    all = times(all, whole / std::max(1.0, pairs));
    for (Index n = 0; n < count_; ++n) {
      const Frame& f = frames_[at(n)];
      add_work(n, 0, key_rows(), times(all, 1 / group_over_own(n)), f.step_heads_q, f.step_heads_k, false, true);
      const StepFrame step{.key_rows = key_rows(), .heads_q = f.step_heads_q, .heads_k = f.step_heads_k};
      end(n, {&step, 1}, false);
    }
  }

  Load gather_load(Index me, double bytes, bool back) const {
    return gathered(s_.machine_, s_.ranks_, inside_, me, bytes, back);
  }

 public:
  static Load gathered(const Machine& machine, Index ranks, Index inside, Index me, double bytes, bool back) {
    const Topology topology(machine);
    Load load;
    Index inner = 1;
    for (std::size_t l = 0; l < topology.levels(); ++l) {
      const Index size = l + 1 < topology.levels() ? machine.levels[l].ranks : ranks;
      const Index first = me / size * size, place = me % inside;
      const Index outer = min_of((ranks / inside), ceil_div(min_of(ranks, first + size) - place, inside)) -
                          max_of(0, ceil_div(first - place, inside));
      const Index peers = outer - inner;
      double moved = bytes * static_cast<double>(peers);
      load.messages[l] = peers;
      load.bytes_in += static_cast<Index>(moved);
      if (machine.relays_gathers && l > 0) {
        const double share = 1 / static_cast<double>(inner);
        load.in[l - 1] += moved * (1 - share);
        load.out[l - 1] = load.in[l - 1];
        moved *= share;
      }
      load.in[l] += moved;
      load.out[l] += moved;
      load.up[l] = load.in[l] * static_cast<double>(topology.below(l));
      inner = outer;
    }
    load.bytes_out = load.bytes_in;
    load.copied = (static_cast<double>(load.bytes_in) + bytes) * (back ? 2 : 1);
    return load;
  }

 private:
  void add_gathers() {
    const Index head_groups = options_.head_groups;
    const bool sequence =
        options_.key_order == KeyOrder::sequence || (options_.key_order == KeyOrder::automatic && s_.stride_ == 1);
    const Index rows = sequence ? s_.layouts_.k.stream().tokens() : s_.layouts_.k.rows() * s_.ranks_;
    o_.steps.resize(at(head_groups));
    for (Index g = 0; g < head_groups; ++g) {
      Pattern there = together(), back = together();
      for (Index n = 0; n < count_; ++n) {
        const Index all = frames_[at(n)].step_heads_k, heads = all * (g + 1) / head_groups - all * g / head_groups;
        const double held = static_cast<double>(key_rows() * heads);
        there.loads[at(n)] = gather_load(rank(n), held * costs_.kv_bytes(), false);
        back.loads[at(n)] = gather_load(rank(n), held * costs_.gradient_bytes(), true);
      }
      o_.steps[at(g)].kv = add(std::move(there));
      if (pass_ == Pass::backward) o_.steps[at(g)].gradients = add(std::move(back));
    }
    for (Index n = 0; n < count_; ++n) {
      TileWork unit;
      if (sequence)
        unit = sample(n).in_sequence[which()];
      else
        for (const Sketch::Cell& c : sample(n).cells) unit += c.work[which()];
      std::vector<StepFrame> steps;
      const Frame& f = frames_[at(n)];
      for (Index g = 0; g < head_groups; ++g) {
        const auto part = [&](Index heads) { return heads * (g + 1) / head_groups - heads * g / head_groups; };
        const Index heads_k = part(f.step_heads_k), heads_q = part(f.step_heads_q);
        add_work(n, g, rows, unit, heads_q, heads_k, false, g == 0);
        steps.push_back({rows, heads_q, heads_k, true});
      }
      end(n, steps, false);
    }
  }

  void add_ring() {
    const Index abreast = min_of(options_.abreast, groups()), steps = schedule::ring_steps(groups(), abreast);
    o_.steps.resize(at(steps));
    const auto shift = [&](Range distances, Index each_groups, double each, bool adds) {
      std::vector<std::vector<Index>> before(at(count_));
      for (Index n = 0; n < count_ && count_ > 1; ++n) before[at(n)] = {(n + count_ - 1) % count_};
      Pattern p = listed(before);
      const std::size_t far = topology_.level(0, s_.ranks_ - 1);
      double crossing = 0;  // messages of a node that leave it
      for (Index d = distances.begin; d < distances.end; ++d)
        crossing += static_cast<double>(min_of(d * inside_, topology_.below(far)));
      for (Index n = 0; n < count_; ++n) {
        const double message = static_cast<double>(each_groups * key_rows() * frames_[at(n)].step_heads_k) * each;
        const double bytes = message * static_cast<double>(distances.size());
        Load& load = p.loads[at(n)];
        // The slowest link of the ring is what all wait for, sooner or later.
        load.in[far] = load.out[far] = bytes;
        load.messages[far] = distances.size();
        load.up[far] = message * crossing;
        load.bytes_in = load.bytes_out = static_cast<Index>(bytes);
        load.copied = adds ? 2 * bytes : bytes;
      }
      return add(std::move(p), true);
    };
    add_ring_moves(groups(), abreast, costs_, pass_ == Pass::backward, shift, o_.steps);
    std::vector<Index> rows;
    for (Index n = 0; n < steps; ++n)
      rows.push_back(key_rows() * schedule::ring_distances(groups(), abreast, n).size());
    for (Index n = 0; n < count_; ++n) {
      std::vector<TileWork> by_step(at(steps));
      for (const Sketch::Cell& c : sample(n).cells) {
        const Index distance = floor_mod(rank(n) / inside_ - c.source / inside_, groups());
        by_step[at(schedule::ring_step_of(distance, abreast))] += c.work[which()];
      }
      add_steps(n, by_step, rows, Move::Kind::shift);
    }
  }

  void add_steps(Index n, const std::vector<TileWork>& by_step, const std::vector<Index>& rows, Move::Kind kind) {
    const Frame& f = frames_[at(n)];
    const auto computed = std::count_if(by_step.begin(), by_step.end(), [](const TileWork& w) { return w.pairs > 0; });
    bool first = true;
    for (std::size_t step = 0; step < by_step.size(); ++step) {
      if (by_step[step].pairs == 0) continue;
      add_work(n, static_cast<Index>(step), rows[step], by_step[step], f.step_heads_q, f.step_heads_k, computed > 1,
               first);
      first = false;
    }
    std::vector<StepFrame> frames;
    for (std::size_t step = 0; step < by_step.size(); ++step) {
      if (kind == Move::Kind::shift && step > 2) break;  // none has more rows
      frames.push_back({rows[step], f.step_heads_q, f.step_heads_k, step > 0});
    }
    // The others of a group see keys of other steps too.
    end(n, frames, (computed > 1 || (inside_ > 1 && by_step.size() > 1)) && f.step_heads_q > 0);
  }

  Index stage_of(Index distance, Index stages) const {
    Index stage = min_of(stages - 1, (distance - 1) * stages / (s_.ranks_ - 1));
    while (distance >= schedule::stage_distances(s_.ranks_, stages, stage).end) ++stage;
    return stage;
  }

  void add_exact() {
    const Index stages = min_of(options_.stages, s_.ranks_ - 1);
    o_.steps.resize(at(1 + stages));
    std::vector<std::vector<Load>> there(at(stages), std::vector<Load>(at(count_))), back = there;
    std::vector<std::vector<std::vector<Index>>> senders(at(stages), std::vector<std::vector<Index>>(at(count_)));
    const double heads = static_cast<double>(s_.layer_.heads_k);
    for (Index n = 0; n < count_; ++n) {
      std::vector<TileWork> by_step(at(1 + stages));
      std::vector<Index> rows(at(1 + stages), 0);
      rows[0] = s_.layouts_.k.rows();
      for (const Sketch::Cell& c : sample(n).cells) {
        const Index distance = (rank(n) - c.source + s_.ranks_) % s_.ranks_;
        Index step = 0;
        if (distance > 0) {
          const Index stage = stage_of(distance, stages);
          step = 1 + stage;
          const double kv = static_cast<double>(c.touched) * heads * costs_.kv_bytes();
          topology_.receive(there[at(stage)][at(n)], rank(n), c.source, kv);
          there[at(stage)][at(n)].copied += kv;
          topology_.send(back[at(stage)][at(n)], rank(n), c.source,
                         static_cast<double>(c.touched) * heads * costs_.gradient_bytes());
          rows[at(step)] += c.touched;
          std::vector<Index>& from = senders[at(stage)][at(n)];
          const Index sender = nearest(c.source);
          if (sender != n && std::find(from.begin(), from.end(), sender) == from.end()) from.push_back(sender);
        }
        by_step[at(step)] += c.work[which()];
      }
      for (const Sketch::Sent& sent : sample(n).sent) {
        const Index stage = stage_of((sent.to - rank(n) + s_.ranks_) % s_.ranks_, stages);
        const double values = static_cast<double>(sent.rows) * heads, gradients = values * costs_.gradient_bytes();
        topology_.send(there[at(stage)][at(n)], rank(n), sent.to, values * costs_.kv_bytes());
        topology_.receive(back[at(stage)][at(n)], rank(n), sent.to, gradients);
        back[at(stage)][at(n)].copied += 2 * gradients;
      }
      add_steps(n, by_step, rows, Move::Kind::send);
    }
    for (Index stage = 0; stage < stages; ++stage) {
      Pattern p = listed(senders[at(stage)]), q = p;
      p.loads = std::move(there[at(stage)]);
      q.loads = std::move(back[at(stage)]);
      o_.steps[at(stage + 1)].kv = add(std::move(p));
      if (pass_ == Pass::backward) o_.steps[at(stage + 1)].gradients = add(std::move(q));
    }
  }

  const Sketch& s_;
  Pass pass_;
  ScheduleOptions options_;
  Costs costs_;
  Topology topology_;
  Index count_, inside_ = 1;
  ScheduleKind kind_ = ScheduleKind::all_gather;
  std::optional<Schedule> first_;
  std::vector<Frame> frames_;
  Outline o_;
  Index memory_ = 0;
};

double Sketch::at_least(const ScheduleOptions& options, Pass pass) const {
  const Index inside = options.kind == ScheduleKind::hybrid ? options.inside : 1;
  const ScheduleKind kind = options.kind == ScheduleKind::hybrid ? options.across : options.kind;
  if (inside < 1 || ranks_ % inside != 0 || (kind != ScheduleKind::ring && kind != ScheduleKind::all_gather)) return 0;
  const Costs costs(machine_, layer_.shape, pass);
  const Topology topology(machine_);
  const double values = static_cast<double>(layouts_.k.rows() * inside * max_of(1, layer_.heads_k / inside));
  double sum = 0;
  for (const double each : {costs.kv_bytes(), pass == Pass::backward ? costs.gradient_bytes() : 0.0}) {
    if (each == 0) continue;
    if (kind == ScheduleKind::all_gather) {
      sum += topology.seconds(Mini::gathered(machine_, ranks_, inside, 0, values * each, false));
      continue;
    }
    Load load;
    const std::size_t far = topology.level(0, ranks_ - 1);
    load.messages[far] = 1;
    const auto seconds = [&](Index groups) {
      load.in[far] = values * each * static_cast<double>(groups);
      return groups > 0 ? topology.seconds(load) : 0;
    };
    const Index others = ranks_ / inside - 1, abreast = max_of(1, options.abreast);
    sum += seconds(abreast) * static_cast<double>(others / abreast) + seconds(others % abreast);
  }
  return sum;
}

Sketch::Result Sketch::estimate(const ScheduleOptions& options, Pass pass) const {
  return Mini(*this, options, pass).run();
}

}  // namespace weft::cost
