// All ranks of a job at once. Each rank's queries are planned once, against all keys; a slice then belongs to the step
// that brings its keys.
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "cost/costs.h"
#include "cost/outline.h"
#include "cost/patterns.h"
#include "cost/ring_moves.h"
#include "index.h"
#include "plan/plan_subset.h"
#include "schedule/schedules.h"
#include "text.h"
#include "weft/error.h"

namespace weft::cost {
namespace {

// Slices looked at in all: some seconds. More ranks than that allows are taken as their neighbours.
constexpr double kMostSlices = 1.2e7;

enum class Form { gather, ring, exact, stay };

Form form_of(const ScheduleOptions& o) {
  switch (o.kind) {  // no default: a new schedule has to say how it moves
    case ScheduleKind::all_gather:
      return Form::gather;
    case ScheduleKind::ring:
      return Form::ring;
    case ScheduleKind::hybrid:
      return o.across == ScheduleKind::all_gather ? Form::gather : Form::ring;  // others are refused by check_mesh
    case ScheduleKind::all_to_all:
      return Form::stay;
    case ScheduleKind::exact:
      break;
  }
  return Form::exact;
}

// Work of one K/V head's group of query heads becomes that of so many heads.
TileWork times(TileWork unit, double groups) {
  unit.pairs *= groups;
  unit.covered *= groups;
  unit.tiles *= groups;
  unit.rows *= groups;
  return unit;
}

class FromJob {
 public:
  FromJob(const Job& job, const Machine& machine, Pass pass)
      : job_(job),
        pass_(pass),
        costs_(machine, job.shape, pass),
        form_(form_of(job.schedule)),
        ranks_(job.layouts.q.ranks()),
        make_(machine, ranks_) {
    schedule::check_shape(job.layouts, job.heads_q, job.heads_k, job.shape);
    const Heads heads{job.heads_q, job.heads_k};
    const Schedule first = schedule::begin(job.problem, job.layouts, 0, heads, job.schedule);
    if (form_ == Form::gather) schedule::check_head_groups(first);
    inside_ = first.ranks_inside();
    sequence_ = form_ == Form::gather && schedule::in_sequence_order(first);
    swap_ = first.swap;
    Schedule of_place = first;
    for (Index place = 0; place < inside_; ++place) {
      of_place.rank = place;
      if (form_ == Form::gather && place > 0) schedule::swap_heads(of_place, inside_);  // for its map of heads
      frames_.push_back(frame_of(of_place));
      add_steps_heads(of_place);
    }
  }

  Outline make() {
    o_.ranks = ranks_;
    o_.pairs.assign(at(ranks_), 0);
    o_.begin_rows.assign(at(ranks_), 0);
    o_.end_rows.assign(at(ranks_), 0);
    o_.steps.resize(at(steps()));
    if (swap_) add_swaps();
    plan_all();
    add_moves();
    if (pass_ == Pass::forward ? job_.shape.max_logit : job_.shape.dsink)
      o_.numbers = add(make_.numbers(static_cast<double>(job_.heads_q) * sizeof(double)));
    return std::move(o_);
  }

 private:
  struct StepHeads {
    Index q = 0, k = 0;
  };
  struct Item {
    std::uint32_t place = 0, source = 0;
    Index step = 0, first_row = 0;
    Slice slice;
  };
  // What a group's queries see in a step, for one K/V head and the query heads that share it.
  struct Seen {
    Index step = 0;
    std::map<Index, TileWork> by_group;  // by query heads of a K/V head
  };

  Index count() const { return ranks_ / inside_; }
  Index abreast() const { return min_of(job_.schedule.abreast, count()); }
  Index stages() const { return min_of(job_.schedule.stages, ranks_ - 1); }
  Index steps() const {
    return form_ == Form::gather ? job_.schedule.head_groups
           : form_ == Form::ring ? schedule::ring_steps(count(), abreast())
           : form_ == Form::stay ? 1
                                 : 1 + stages();
  }
  int add(Pattern pattern) {
    o_.patterns.push_back(std::move(pattern));
    return static_cast<int>(o_.patterns.size()) - 1;
  }

  void add_steps_heads(const Schedule& s) {
    std::vector<StepHeads> heads;
    if (form_ == Form::gather) {
      const Index groups = job_.schedule.head_groups, all = s.step_heads_k();
      for (Index g = 0; g < groups; ++g) {
        const Range k{all * g / groups, all * (g + 1) / groups};
        heads.push_back({schedule::query_heads(s, k).size(), k.size()});
      }
    } else {
      heads.push_back({s.step_heads_q(), s.step_heads_k()});
    }
    heads_.push_back(std::move(heads));
  }
  const StepHeads& heads(Index place, Index step) const {
    return heads_[at(place)][form_ == Form::gather ? at(step) : 0];
  }
  static Index group_of(const StepHeads& h) { return h.k > 0 ? max_of(1, h.q / h.k) : 1; }

  Index step_of(Index rank, Index source) const {
    if (form_ == Form::ring)
      return schedule::ring_step_of((rank / inside_ - source / inside_ + count()) % count(), abreast());
    if (form_ != Form::exact) return 0;
    const Index distance = (rank - source + ranks_) % ranks_;
    if (distance == 0) return 0;
    // The first stage that ends behind it.
    Index stage = (distance - 1) * stages() / (ranks_ - 1);
    while (distance >= schedule::stage_distances(ranks_, stages(), stage).end) ++stage;
    while (distance < schedule::stage_distances(ranks_, stages(), stage).begin) --stage;
    return 1 + stage;
  }

  // By the sequences whose tokens the rank holds: there may be many more.
  Plan plan_of(Index rank, const RunList& keys) const {
    const RunList own = job_.layouts.q.runs(rank);
    return make_plan(job_.problem, own, keys, sequences_in(job_.problem.packing().q(), own));
  }

  void plan_all() {
    const Layout &q = job_.layouts.q, &k = job_.layouts.k;
    const RunList keys = sequence_ ? k.sequence_order() : k.rank_order();
    choose_sample(keys);
    if (form_ == Form::exact)
      for (Index stage = 0; stage < stages(); ++stage) messages_.push_back(std::make_shared<std::vector<Span>>());
    for (Index group = 0; group < count(); group += o_.repeat) {
      std::vector<Item>& items = items_;
      items.clear();
      std::vector<TileCounter> counters;  // by distinct group of heads
      const std::vector<Index> kinds = head_kinds();
      for (const Index g : kinds) counters.emplace_back(g, 1, costs_.rate());
      for (Index member = 0; member < inside_; member += skip_) {
        const Index rank = group * inside_ + member;
        const Plan plan = plan_of(rank, keys);
        for (const Slice& s : plan.slices) {
          if (form_ == Form::gather || form_ == Form::stay) {
            for (TileCounter& c : counters) c.add(s, member * q.rows());
            continue;
          }
          const Index source = s.k_begin / k.rows();
          items.push_back({place_of(group, source), static_cast<std::uint32_t>(source), 0, member * q.rows(), s});
        }
      }
      std::vector<Seen> seen;
      const auto take = [&](Index step) {
        if (!counters.front().any()) return;
        seen.push_back({step, {}});
        const double all = static_cast<double>(inside_) / static_cast<double>(ceil_div(inside_, skip_));
        for (std::size_t n = 0; n < kinds.size(); ++n) seen.back().by_group[kinds[n]] = times(counters[n].take(), all);
      };
      sort_items(group);
      for (std::size_t n = 0; n < items.size(); ++n) {
        for (TileCounter& c : counters) c.add(items[n].slice, items[n].first_row);
        if (n + 1 == items.size() || items[n + 1].step != items[n].step) take(items[n].step);
      }
      if (form_ == Form::gather || form_ == Form::stay) take(0);
      std::vector<Index> key_rows(at(steps()), keys_of_step());
      for (Index step = 0; step < steps() && form_ == Form::ring; ++step)
        key_rows[at(step)] *= schedule::ring_distances(count(), abreast(), step).size();
      if (form_ == Form::exact) touch(group, items, key_rows);
      add_group(group, seen, key_rows);
    }
  }

  // Sources by their distance before the group, which is the order of steps.
  std::uint32_t place_of(Index group, Index source) const {
    const Index of = source / inside_, distance = group >= of ? group - of : group - of + count();
    return static_cast<std::uint32_t>(distance * inside_ + source - of * inside_);
  }

  // By step, each source's together.
  void sort_items(Index group) {
    if (static_cast<Index>(items_.size()) < ranks_) {
      // Equal ones stay in their order: until a step is known its place holds their numbers.
      for (std::size_t n = 0; n < items_.size(); ++n) items_[n].step = static_cast<Index>(n);
      std::sort(items_.begin(), items_.end(),
                [](const Item& a, const Item& b) { return a.place != b.place ? a.place < b.place : a.step < b.step; });
    } else {
      places_.assign(at(ranks_) + 1, 0);
      for (const Item& item : items_) ++places_[item.place + 1];
      for (std::size_t n = 1; n < places_.size(); ++n) places_[n] += places_[n - 1];
      sorted_.resize(items_.size());
      for (const Item& item : items_) sorted_[places_[item.place]++] = item;
      items_.swap(sorted_);
    }
    for (std::size_t n = 0; n < items_.size(); ++n) {
      const bool same = n > 0 && items_[n].source == items_[n - 1].source;
      items_[n].step = same ? items_[n - 1].step : step_of(group * inside_, items_[n].source);
    }
  }

  std::vector<Index> head_kinds() const {
    std::vector<Index> kinds;
    for (const auto& place : heads_)
      for (const StepHeads& h : place)
        if (h.q > 0) kinds.push_back(group_of(h));
    std::sort(kinds.begin(), kinds.end());
    kinds.erase(std::unique(kinds.begin(), kinds.end()), kinds.end());
    if (kinds.empty()) kinds.push_back(1);
    return kinds;
  }

  Index keys_of_step() const {
    const Layout& k = job_.layouts.k;
    if (form_ == Form::gather) return sequence_ ? k.stream().tokens() : k.rows() * ranks_;
    return k.rows() * inside_;
  }

  // Looks at three ranks to tell how many slices all have.
  void choose_sample(const RunList& keys) {
    o_.stride = inside_;
    constexpr Index kFew = 256;
    if (ranks_ > kFew) {
      double most = 0;
      for (const Index rank : {Index{0}, ranks_ / 2, ranks_ - 1})
        most = std::max(most, static_cast<double>(plan_of(rank, keys).slices.size()));
      const double times = std::ceil(std::max(1.0, most * static_cast<double>(ranks_) / kMostSlices));
      constexpr Index kLeast = 16;  // groups
      o_.repeat = min_of(static_cast<Index>(times), max_of(1, count() / kLeast));
      skip_ = min_of(inside_, ceil_div(static_cast<Index>(times), o_.repeat));
    }
    o_.planned = ceil_div(count(), o_.repeat) * ceil_div(inside_, skip_);
  }

  // Rows of other ranks that a rank of `exact` gets. Items are those of the rank, by step and source.
  void touch(Index rank, const std::vector<Item>& items, std::vector<Index>& key_rows) {
    const Index rows = job_.layouts.k.rows();
    key_rows.assign(at(steps()), 0);
    key_rows[0] = rows;
    std::vector<Range> ranges;
    for (std::size_t n = 0; n < items.size(); ++n) {
      if (items[n].step == 0) continue;
      ranges.push_back(touched_keys(items[n].slice));
      if (n + 1 < items.size() && items[n + 1].step == items[n].step && items[n + 1].source == items[n].source)
        continue;
      std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
      Index touched = 0, end = 0;
      for (const Range& r : ranges) {
        touched += max_of(0, r.end - max_of(end, r.begin));
        end = max_of(end, r.end);
      }
      ranges.clear();
      key_rows[at(items[n].step)] += touched;
      if (touched == 0) continue;
      const Index distance = (rank - items[n].source + ranks_) % ranks_;
      messages_[at(items[n].step - 1)]->push_back(
          {static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(distance), static_cast<double>(touched)});
    }
  }

  void add_group(Index group, const std::vector<Seen>& seen, const std::vector<Index>& key_rows) {
    const bool moves_first = form_ == Form::gather;
    const bool partial = form_ != Form::gather && seen.size() > 1;
    for (Index place = 0; place < inside_; ++place) {
      const Frame& frame = frames_[at(place)];
      const Index rank = group * inside_ + place;
      bool first = true;
      double pairs = 0;
      for (const Seen& s : seen) {
        // The slices of a gather are those of every group of heads.
        const Index last = form_ == Form::gather ? steps() : s.step + 1;
        for (Index step = s.step; step < last; ++step) {
          const StepHeads& h = heads(place, step);
          if (h.q == 0) continue;
          const TileWork work =
              times(s.by_group.at(group_of(h)), static_cast<double>(h.q) / static_cast<double>(group_of(h)));
          const StepFrame shape{.key_rows = key_rows[at(step)], .heads_q = h.q, .heads_k = h.k};
          o_.steps[at(step)].work.push_back(costs_.work(rank, frame, shape, work, partial, first));
          pairs += work.pairs;
          first = false;
        }
      }
      const double begin = costs_.begin_rows(frame, moves_first);
      const double end = costs_.end_rows(frame, partial && frame.step_heads_q > 0);
      Index same = rank;
      for (Index n = 0; n < o_.repeat && same < ranks_; ++n, same += inside_) {
        o_.begin_rows[at(same)] = static_cast<float>(begin);
        o_.end_rows[at(same)] = static_cast<float>(end);
        o_.pairs[at(same)] = static_cast<Index>(pairs);
      }
      keep_memory(frame, place, key_rows, partial);
    }
  }

  void keep_memory(const Frame& frame, Index place, const std::vector<Index>& key_rows, bool partial) {
    std::vector<StepFrame> shapes;
    const Index few = form_ == Form::ring ? min_of(steps(), 3) : steps();  // no later shift has more
    for (Index n = 0; n < few; ++n) {
      const StepHeads& h = heads(place, n);
      const bool moves = form_ == Form::gather || (form_ != Form::stay && n > 0);
      shapes.push_back({key_rows[at(n)], h.q, h.k, moves});
    }
    const RankMemory m = costs_.memory(frame, shapes, partial && frame.step_heads_q > 0);
    if (m.total() > o_.memory.total()) o_.memory = m;
  }

  void add_swaps() {
    const auto bytes = [&](const Costs::SwapBytes& of) {
      std::vector<double> all;
      for (Index i = 0; i < inside_; ++i)
        all.push_back(static_cast<double>(job_.layouts.q.rows() * swap_->heads_q[at(i)].size() * of.q +
                                          job_.layouts.k.rows() * swap_->heads_k[at(i)].size() * of.k));
      return all;
    };
    o_.swap_in = add(make_.swap(inside_, bytes(costs_.swap_in()), false, false));
    o_.swap_out = add(make_.swap(inside_, bytes(costs_.swap_out()), true, false));
    if (pass_ == Pass::backward)
      o_.swap_home = add(make_.swap(inside_, bytes({0, static_cast<Index>(costs_.gradient_bytes())}), true, true));
  }

  // Rows of K and V that a rank gives to a gather.
  std::vector<double> gathered_rows() const {
    const Layout& k = job_.layouts.k;
    std::vector<double> rows(at(ranks_), static_cast<double>(k.rows() * inside_));
    if (!sequence_) return rows;
    std::vector<double> held(at(count()), 0);
    for (Index r = 0; r < ranks_; ++r)
      for (const Run& run : k.runs(r).runs()) held[at(r / inside_)] += static_cast<double>(run.count);
    for (Index r = 0; r < ranks_; ++r) rows[at(r)] = held[at(r / inside_)];
    return rows;
  }

  void add_moves() {
    switch (form_) {
      case Form::stay:
        return;
      case Form::gather:
        return add_gathers();
      case Form::ring:
        return add_shifts();
      case Form::exact:
        return add_sends();
    }
  }

  void add_gathers() {
    const std::vector<double> rows = gathered_rows();
    for (Index step = 0; step < steps(); ++step) {
      const auto bytes = [&](double each) {
        std::vector<double> all(rows);
        for (Index r = 0; r < ranks_; ++r) all[at(r)] *= each * static_cast<double>(heads(r % inside_, step).k);
        return all;
      };
      o_.steps[at(step)].kv = add(make_.gather(inside_, bytes(costs_.kv_bytes()), false));
      if (pass_ == Pass::backward)
        o_.steps[at(step)].gradients = add(make_.gather(inside_, bytes(costs_.gradient_bytes()), true));
    }
  }

  void add_shifts() {
    constexpr Index kMostMessages = Index{1} << 23;  // of an exchange, listed one by one
    if (ranks_ > kMostMessages / abreast())
      throw Error(
          text("a ring of ", ranks_, " ranks, ", abreast(), " abreast: ", ranks_ * abreast(), " messages at once"),
          text("use up to ", kMostMessages / ranks_, " abreast, or all_gather, which moves the same bytes"));
    const auto shift = [&](Range distances, Index groups, double each, bool adds) {
      std::vector<Patterns::Sent> messages;
      for (Index r = 0; r < ranks_; ++r) {
        const double bytes = static_cast<double>(groups * keys_of_step() * heads(r % inside_, 0).k) * each;
        for (Index d = distances.begin; d < distances.end; ++d)
          messages.push_back({r, (r + d * inside_) % ranks_, bytes});
      }
      return add(make_.listed(std::move(messages), adds, false));
    };
    add_ring_moves(count(), abreast(), costs_, pass_ == Pass::backward, shift, o_.steps);
  }

  void add_sends() {
    const double heads = static_cast<double>(job_.heads_k);
    for (Index stage = 0; stage < stages(); ++stage) {
      const std::shared_ptr<const std::vector<Span>> rows = messages_[at(stage)];
      StepOutline& step = o_.steps[at(stage + 1)];
      step.kv = add(make_.spans(rows, o_.repeat, heads * costs_.kv_bytes(), false));
      if (pass_ == Pass::backward)
        step.gradients = add(make_.spans(rows, o_.repeat, heads * costs_.gradient_bytes(), true));
    }
  }

  const Job& job_;
  Pass pass_;
  Costs costs_;
  Form form_;
  Index ranks_, inside_ = 1;
  Index skip_ = 1;  // of a group's members every so many-th is planned
  Patterns make_;
  bool sequence_ = false;
  std::optional<Swap> swap_;
  std::vector<Frame> frames_;                                 // by place in a group
  std::vector<std::vector<StepHeads>> heads_;                 // by place, and step of a gather
  std::vector<std::shared_ptr<std::vector<Span>>> messages_;  // exact, by stage
  std::vector<Item> items_, sorted_;  // of the group that is planned: kept, as there are many groups
  std::vector<std::size_t> places_;
  Outline o_;
};

}  // namespace

Outline outline_of(const Job& job, const Machine& machine, Pass pass) { return FromJob(job, machine, pass).make(); }

}  // namespace weft::cost
