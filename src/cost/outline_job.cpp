// All ranks of a job at once. Each rank's queries are planned once, against all keys; a slice then belongs to the step
// that brings its keys.
#include <algorithm>
#include <cmath>
#include <map>

#include "cost/outline_builder.h"
#include "cost/patterns.h"
#include "plan/plan_subset.h"
#include "text.h"
#include "weft/error.h"

namespace weft::cost {
namespace {

// Slices looked at in all: some seconds. More ranks than that allows are taken as their neighbours.
constexpr double kMostSlices = 1.2e7;

// Messages that are listed one by one, of one exchange and of all: some GB.
constexpr Index kMostMessages = Index{1} << 23;

Schedule checked(const Job& job) {
  schedule::check_shape(job.layouts, job.heads_q, job.heads_k, job.shape);
  check_options(job.schedule);
  Schedule s = schedule::unscheduled(job.problem, job.layouts, 0, {job.heads_q, job.heads_k}, job.schedule);
  schedule::require_layouts(job.schedule, job.layouts);
  return s;
}

class JobOutline : private OutlineBuilder {
 public:
  JobOutline(const Job& job, const Machine& machine, Pass pass)
      : OutlineBuilder(
            checked(job),
            schedule::describe_schedule(job.schedule, schedule::shape_of(job.layouts, {job.heads_q, job.heads_k})),
            machine, job.shape, pass),
        job_(job),
        make_(machine, ranks()),
        messages_(at(steps())) {
    for (Index n = 0; n < ulysses_; ++n) places_.push_back(place(n));
    for (Index n = 0; n < steps(); ++n)
      if (step(n).move == Move::Kind::send) messages_[at(n)] = std::make_shared<std::vector<Span>>();
  }

  Outline make() {
    o_.ranks = ranks();
    o_.pairs.assign(at(ranks()), 0);
    o_.begin_rows.assign(at(ranks()), 0);
    o_.end_rows.assign(at(ranks()), 0);
    add_swaps();
    plan_all();
    add_moves();
    if (pass_ == Pass::forward ? job_.shape.max_logit : job_.shape.dsink)
      o_.numbers = add(make_.numbers(static_cast<double>(job_.heads_q) * sizeof(double)));
    return std::move(o_);
  }

 private:
  struct Item {
    std::uint32_t place = 0, source = 0;
    Index meeting = 0, first_row = 0;
    Slice slice;
  };
  // What a group's queries see in a meeting, for one K/V head and the query heads that share it.
  struct Seen {
    Index meeting = 0;
    std::map<Index, TileWork> by_group;  // by query heads of a K/V head
  };

  static Index group_of(const HeadCounts& h) { return h.k > 0 ? max_of(1, h.q / h.k) : 1; }

  // By the sequences whose tokens the rank holds: there may be many more.
  Plan plan_of(Index rank, const RunList& keys) const {
    const RunList own = job_.layouts.q.runs(rank);
    return make_plan(job_.problem, own, keys, sequences_in(job_.problem.packing().q(), own));
  }

  void plan_all() {
    const Layout& k = job_.layouts.k;
    const RunList keys = step(0).sequence_order ? k.sequence_order() : k.rank_order();
    choose_sample(keys);
    const std::vector<Index> kinds = head_kinds(), fixed_rows = key_rows();
    std::vector<TileCounter> counters;  // by distinct group of heads
    for (const Index g : kinds) counters.emplace_back(g, 1, costs_.rate());
    for (Index group = 0; group < groups_; group += o_.repeat) {
      find_items(group, keys, counters);
      std::vector<Seen> seen;
      const auto take = [&](Index meeting) {
        if (!counters.front().any()) return;
        seen.push_back({meeting, {}});
        const double all = static_cast<double>(ulysses_) / static_cast<double>(ceil_div(ulysses_, skip_));
        for (std::size_t n = 0; n < kinds.size(); ++n) seen.back().by_group[kinds[n]] = times(counters[n].take(), all);
      };
      sort_items();
      for (std::size_t n = 0; n < items_.size(); ++n) {
        for (TileCounter& c : counters) c.add(items_[n].slice, items_[n].first_row);
        if (n + 1 == items_.size() || items_[n + 1].meeting != items_[n].meeting) take(items_[n].meeting);
      }
      if (meetings() == 1) take(0);
      std::sort(seen.begin(), seen.end(), [](const Seen& a, const Seen& b) { return a.meeting < b.meeting; });
      std::vector<Index> rows = fixed_rows;
      add_touched(group, rows);
      add_group(group, seen, rows);
    }
  }

  // Slices of the group's queries: to the counters if all belong to one meeting, otherwise to the items.
  void find_items(Index group, const RunList& keys, std::vector<TileCounter>& counters) {
    items_.clear();
    const Index q_rows = job_.layouts.q.rows(), k_rows = job_.layouts.k.rows();
    for (Index member = 0; member < ulysses_; member += skip_) {
      for (const Slice& s : plan_of(group * ulysses_ + member, keys).slices) {
        if (meetings() == 1) {
          for (TileCounter& c : counters) c.add(s, member * q_rows);
          continue;
        }
        const Index source = s.k_begin / k_rows;
        items_.push_back({place_of(group, source), static_cast<std::uint32_t>(source), 0, member * q_rows, s});
      }
    }
  }

  // Sources by their distance before the group.
  std::uint32_t place_of(Index group, Index source) const {
    return static_cast<std::uint32_t>(floor_mod(group - source / ulysses_, groups_) * ulysses_ + source % ulysses_);
  }

  // By distance, each source's together.
  void sort_items() {
    if (static_cast<Index>(items_.size()) < ranks()) {
      // Equal ones stay in their order: until the meeting is known it holds their numbers.
      for (std::size_t n = 0; n < items_.size(); ++n) items_[n].meeting = static_cast<Index>(n);
      std::sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) {
        return a.place != b.place ? a.place < b.place : a.meeting < b.meeting;
      });
    } else {
      counts_.assign(at(ranks()) + 1, 0);
      for (const Item& item : items_) ++counts_[item.place + 1];
      for (std::size_t n = 1; n < counts_.size(); ++n) counts_[n] += counts_[n - 1];
      sorted_.resize(items_.size());
      for (const Item& item : items_) sorted_[counts_[item.place]++] = item;
      items_.swap(sorted_);
    }
    for (std::size_t n = 0; n < items_.size(); ++n) {
      const bool same = n > 0 && items_[n].source == items_[n - 1].source;
      items_[n].meeting = same ? items_[n - 1].meeting : meeting_at(items_[n].place / ulysses_);
    }
  }

  std::vector<Index> head_kinds() const {
    std::vector<Index> kinds;
    for (const Place& p : places_)
      for (const HeadCounts& h : p.heads)
        if (h.q > 0) kinds.push_back(group_of(h));
    std::sort(kinds.begin(), kinds.end());
    kinds.erase(std::unique(kinds.begin(), kinds.end()), kinds.end());
    if (kinds.empty()) kinds.push_back(1);
    return kinds;
  }

  // Looks at three ranks to tell how many slices all have.
  void choose_sample(const RunList& keys) {
    o_.stride = ulysses_;
    constexpr Index kFew = 256;
    if (ranks() > kFew) {
      double most = 0;
      for (const Index rank : {Index{0}, ranks() / 2, ranks() - 1})
        most = std::max(most, static_cast<double>(plan_of(rank, keys).slices.size()));
      const double times = std::ceil(std::max(1.0, most * static_cast<double>(ranks()) / kMostSlices));
      constexpr Index kLeast = 16;  // groups
      o_.repeat = min_of(static_cast<Index>(times), max_of(1, groups_ / kLeast));
      skip_ = min_of(ulysses_, ceil_div(static_cast<Index>(times), o_.repeat));
    }
    o_.planned = ceil_div(groups_, o_.repeat) * ceil_div(ulysses_, skip_);
  }

  // Rows that the rank gets in steps that move only what is seen. Items are those of the rank, by meeting and source.
  void add_touched(Index rank, std::vector<Index>& rows) {
    std::vector<Range> ranges;
    for (std::size_t n = 0; n < items_.size(); ++n) {
      const Index of = steps_of(items_[n].meeting).begin;
      if (!messages_[at(of)]) continue;
      ranges.push_back(touched_keys(items_[n].slice));
      if (n + 1 < items_.size() && items_[n + 1].source == items_[n].source) continue;
      std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
      Index touched = 0, end = 0;
      for (const Range& r : ranges) {
        touched += max_of(0, r.end - max_of(end, r.begin));
        end = max_of(end, r.end);
      }
      ranges.clear();
      rows[at(of)] += touched;
      if (touched > 0)
        messages_[at(of)]->push_back({static_cast<std::uint32_t>(rank), items_[n].place, static_cast<double>(touched)});
    }
  }

  void add_group(Index group, const std::vector<Seen>& seen, const std::vector<Index>& rows) {
    const bool partial = seen.size() > 1;
    std::vector<Index> met;
    for (const Seen& s : seen) met.push_back(s.meeting);
    for (Index n = 0; n < ulysses_; ++n) {
      const Place& p = places_[at(n)];
      const Index rank = group * ulysses_ + n;
      const double pairs = add_work(rank, p, met, rows, partial, [&](std::size_t i, const HeadCounts& h) {
        return times(seen[i].by_group.at(group_of(h)), static_cast<double>(h.q) / static_cast<double>(group_of(h)));
      });
      const double begin = costs_.begin_rows(p.frame, step(0).move.has_value());
      const double end = costs_.end_rows(p.frame, partial && p.frame.step_heads_q > 0);
      Index same = rank;
      for (Index i = 0; i < o_.repeat && same < ranks(); ++i, same += ulysses_) {
        o_.begin_rows[at(same)] = static_cast<float>(begin);
        o_.end_rows[at(same)] = static_cast<float>(end);
        o_.pairs[at(same)] = static_cast<Index>(pairs);
      }
      add_memory(p, rows, partial);
    }
  }

  Pattern swap(const std::vector<double>& bytes, bool back, bool adds) const override {
    return make_.swap(ulysses_, bytes, back, adds);
  }

  Pattern gather(Index n, double each, bool back) const override {
    std::vector<double> rows(at(groups_), static_cast<double>(group_rows()));
    if (step(n).sequence_order) {  // only rows that hold tokens move
      rows.assign(at(groups_), 0);
      for (Index r = 0; r < ranks(); ++r)
        for (const Run& run : job_.layouts.k.runs(r).runs()) rows[at(r / ulysses_)] += static_cast<double>(run.count);
    }
    std::vector<double> bytes;
    for (Index r = 0; r < ranks(); ++r)
      bytes.push_back(rows[at(r / ulysses_)] * (each * static_cast<double>(places_[at(r % ulysses_)].of(n).k)));
    return make_.gather(ulysses_, bytes, back);
  }

  Pattern shift(Range distances, Index groups, double each, bool adds) override {
    const Index messages = ranks() * distances.size();
    listed_ += messages;
    if (messages > kMostMessages || listed_ > 2 * kMostMessages)
      throw Error(text(words(job_.schedule), " on ", ranks(), " ranks: ", max_of(messages, listed_),
                       " messages are too many to simulate"),
                  text("use up to ", kMostMessages / ranks(),
                       " ranks_per_step, or a schedule that gathers, which moves the same bytes"));
    std::vector<Patterns::Sent> sent;
    for (Index r = 0; r < ranks(); ++r) {
      const Index heads = places_[at(r % ulysses_)].of(0).k;
      for (Index d = distances.begin; d < distances.end; ++d)
        sent.push_back({r, (r + d * ulysses_) % ranks(), static_cast<double>(groups * group_rows() * heads) * each});
    }
    return make_.listed(std::move(sent), adds, false);
  }

  Pattern send(Index n, double each, bool back) const override {
    return make_.spans(messages_[at(n)], o_.repeat, static_cast<double>(job_.heads_k) * each, back);
  }

  const Job& job_;
  Index skip_ = 1;  // of a group's members every so many-th is planned
  Patterns make_;
  std::vector<Place> places_;
  std::vector<std::shared_ptr<std::vector<Span>>> messages_;  // by step that moves what is seen
  std::vector<Item> items_, sorted_;                          // of one group; members so as to reuse their memory
  std::vector<std::size_t> counts_;                           // of items by place
  Index listed_ = 0;                                          // messages so far
};

}  // namespace

Outline outline_of(const Job& job, const Machine& machine, Pass pass) { return JobOutline(job, machine, pass).make(); }

}  // namespace weft::cost
