// All ranks of a job at once. Each rank's queries are planned once, against all keys; a slice then belongs to the step
// that brings its keys.
#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "cost/outline_builder.h"
#include "cost/patterns.h"
#include "plan/plan_subset.h"
#include "ranges.h"
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
  schedule::require_layouts(job.schedule, job.layouts, job.shape.source > 0);
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
        messages_(at(steps())),
        hops_(at(steps())) {
    for (Index n = 0; n < ulysses_; ++n) places_.push_back(place(n));
    moved_.assign(at(groups_), group_rows());
    if (step(0).sequence_order) {  // only rows that hold tokens move
      moved_.assign(at(groups_), 0);
      for (Index r = 0; r < ranks(); ++r)
        for (const Run& run : job_.layouts.k.runs(r).runs()) moved_[at(r / ulysses_)] += run.count;
    }
    for (Index n = 0; n < steps(); ++n)
      if (step(n).move == Move::Kind::send) messages_[at(n)] = std::make_shared<std::vector<Span>>();
  }

  Outline make() {
    o_.ranks = ranks();
    o_.pairs.assign(at(ranks()), 0);
    add_head_groups();
    query_ranks() > 1 ? plan_mesh() : plan_all();
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
      end_rank(group);
      add_group(group, seen, rows);
    }
  }

  // The same of a mesh: which rank attends a slice, and in which step, follows from who holds its queries and keys.
  void plan_mesh() {
    const RunList keys = job_.layouts.k.rank_order();
    choose_sample(keys);
    const HeadCounts& heads = places_[0].of(0);
    TileCounter counter(group_of(heads), 1, costs_.rate());
    const double groups_of_heads = static_cast<double>(heads.q) / static_cast<double>(group_of(heads));
    struct MeshItem {
      Index place = 0, step = 0, number = 0, first_row = 0;
      Slice slice;
    };
    std::vector<MeshItem> items;
    for (Index group = 0; group < groups_; group += o_.repeat) {
      items.clear();
      for (Index member = 0; member < query_ranks(); ++member) {
        for (const Slice& s : plan_of(group * spacing_ + member, keys).slices) {
          const Index source = s.k_begin / job_.layouts.k.rows(), place = source % spacing_;
          const Index part = floor_mod(place - member, spacing_);
          const Index n = mesh_step(part, floor_mod(group - source / spacing_, groups_));
          items.push_back(
              {place, n, static_cast<Index>(items.size()), (part - step(n).queries.begin) * job_.layouts.q.rows(), s});
        }
      }
      std::sort(items.begin(), items.end(), [](const MeshItem& a, const MeshItem& b) {
        return std::tie(a.place, a.step, a.number) < std::tie(b.place, b.step, b.number);
      });
      for (Index place = 0, n = 0; place < spacing_; ++place) {
        std::vector<TileWork> by_step(at(steps()));
        for (; n < static_cast<Index>(items.size()) && items[at(n)].place == place; ++n) {
          const MeshItem& item = items[at(n)];
          counter.add(item.slice, item.first_row);
          const bool last = n + 1 == static_cast<Index>(items.size()) || items[at(n + 1)].place != place ||
                            items[at(n + 1)].step != item.step;
          if (last) by_step[at(item.step)] = times(counter.take(), groups_of_heads);
        }
        const Index rank = group * spacing_ + place;
        const double pairs = add_mesh_work(rank, places_[0], by_step);
        for (Index i = 0, same = rank; i < o_.repeat && same < ranks(); ++i, same += spacing_) {
          add_rows(same, places_[0], job_.layouts.q.rows() > 0);
          o_.pairs[at(same)] = static_cast<Index>(pairs);
        }
      }
    }
  }

  // Slices of the group's queries: to the counters if all belong to one meeting, otherwise to the items.
  void find_items(Index group, const RunList& keys, std::vector<TileCounter>& counters) {
    items_.clear();
    const Index q_rows = job_.layouts.q.rows(), k_rows = job_.layouts.k.rows();
    for (Index member = 0; member < ulysses_; member += skip_) {
      for (const Slice& s : plan_of(group * ulysses_ + member, keys).slices) {
        if (meetings() == 1 && !messages_[0]) {
          for (TileCounter& c : counters) c.add(s, member * q_rows);
          continue;
        }
        const Index source = s.k_begin / k_rows;
        items_.push_back({place_of(group, source), static_cast<std::uint32_t>(source), 0, member * q_rows, s});
      }
    }
  }

  // Sources in the order in which the group meets them.
  std::uint32_t place_of(Index group, Index source) const {
    return static_cast<std::uint32_t>(met_at(group, source / ulysses_) * ulysses_ + source % ulysses_);
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
    o_.stride = spacing_;
    constexpr Index kFew = 256;
    if (ranks() > kFew && !relays()) {  // what a node wants together is known if all its ranks are planned
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
      const Index of = first_step(items_[n].meeting);
      if (!messages_[at(of)]) continue;
      ranges.push_back(touched_keys(items_[n].slice));
      if (n + 1 < items_.size() && items_[n + 1].source == items_[n].source) continue;
      ranges = joined(std::move(ranges));
      const Index touched = schedule::rows_in(ranges);
      for (const Index each : steps_of(items_[n].meeting)) rows[at(each)] += touched;
      if (relays()) add_hops(hops_[at(of)], rank, items_[n].source, ranges);
      ranges.clear();
      if (touched > 0 && !relays())
        messages_[at(of)]->push_back({static_cast<std::uint32_t>(rank), items_[n].place, static_cast<double>(touched)});
    }
  }

  // Rows that a rank sees of a source, on their way through its node.
  struct Hops {
    std::vector<Patterns::Sent> enter, pass;     // rows
    std::map<Index, Index> passed;               // by rank of the node: rows that it passes on to the rank at hand
    std::map<Index, std::vector<Range>> wanted;  // by source of another node: what the node at hand sees
    std::vector<Index> relayed = {};             // by rank of the node at hand
  };
  void add_hops(Hops& hops, Index rank, Index source, const std::vector<Range>& seen) {
    const Index rows = schedule::rows_in(seen);
    if (rank / node() == source / node()) {
      hops.pass.push_back({source, rank, static_cast<double>(rows)});
      return;
    }
    hops.passed[relay(rank, source)] += rows;
    std::vector<Range>& wanted = hops.wanted[source];
    wanted.insert(wanted.end(), seen.begin(), seen.end());
  }
  void end_rank(Index rank) {
    for (Hops& hops : hops_) {
      for (const auto& [from, rows] : hops.passed) hops.pass.push_back({from, rank, static_cast<double>(rows)});
      hops.passed.clear();
    }
  }
  // The rank of `rank`'s node that brings rows of a source into it.
  Index relay(Index rank, Index source) const { return rank / node() * node() + source % node(); }
  // The last rank of a node has been planned: what they want together enters the node.
  void end_node(Index last) {
    for (Hops& hops : hops_) {
      hops.relayed.assign(at(node()), 0);
      for (auto& [source, ranges] : hops.wanted) {
        const Index rows = schedule::rows_in(joined(std::move(ranges)));
        hops.enter.push_back({source, relay(last, source), static_cast<double>(rows)});
        hops.relayed[at(source % node())] += rows;
      }
      hops.wanted.clear();
    }
    for (const Pending& p : pending_) {
      std::vector<Index> relayed;
      for (Index n = 0; n < steps(); ++n)
        relayed.push_back(step(n).move == Move::Kind::send ? hops_[at(first_alike(n))].relayed[at(p.rank % node())]
                                                           : gathered_rows(p.rank, n));
      add_memory(places_[at(p.rank % ulysses_)], p.rows, p.partial, relayed);
    }
    pending_.clear();
  }
  // Rows that a rank of a gather brings into its node.
  Index gathered_rows(Index rank, Index n) const {
    if (schedule::meets_node(step(n))) return group_rows();
    Index rows = 0;
    const Index group = rank / ulysses_;
    for (Index g = group % node(); g < groups_ && step(n).move; g += node())
      if (g != group) rows += moved_[at(g)];
    return rows;
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
      Index same = rank;
      for (Index i = 0; i < o_.repeat && same < ranks(); ++i, same += ulysses_) {
        add_rows(same, p, partial);
        o_.pairs[at(same)] = static_cast<Index>(pairs);
      }
      if (relays())
        pending_.push_back({rank, rows, partial});
      else
        add_memory(p, rows, partial);
    }
    if (relays() && group % node() == node() - 1) end_node(group);
  }

  Pattern swap(const std::vector<double>& bytes, bool back, bool adds) const override {
    return make_.swap(ulysses_, bytes, back, adds);
  }

  // What each rank gives to a gather.
  std::vector<double> gathered_bytes(Index n, double each) const {
    std::vector<double> bytes;
    for (Index g = 0; g < groups_; ++g) {
      const double rows = static_cast<double>(moved_[at(g)]);
      for (const Place& p : places_) bytes.push_back(rows * (each * static_cast<double>(p.of(n).moved)));
    }
    return bytes;
  }

  Pattern gather(Index n, double each, bool back) const override {
    const std::vector<double> bytes = gathered_bytes(n, each);
    if (!relays()) return make_.gather(ulysses_, bytes, back);
    const Index block = node() * ulysses_;  // ranks of a node
    const bool one = schedule::meets_node(step(n));
    std::vector<double> passed(at(block), 0);
    for (Index r = 0; r < ranks(); ++r) passed[at(r % block)] += bytes[at(r)];
    std::vector<Patterns::Sent> sent;
    for (Index from = 0; from < ranks(); ++from) {
      const double own = bytes[at(from)], others = passed[at(from % block)] - own;
      for (Index to = from / block * block + from % ulysses_; to / block == from / block; to += ulysses_) {
        sent.push_back({from, to, own});  // of one node: what it passes on is as much
        if (!one) sent.push_back({from, to, others});
      }
    }
    return listed(std::move(sent), back, false);
  }

  Pattern enter(Index n, double each, bool back) const override {
    std::vector<Patterns::Sent> sent;
    if (step(n).move == Move::Kind::send) {
      sent = in_bytes(hops_[at(first_alike(n))].enter, n, each);
    } else {
      const std::vector<double> bytes = gathered_bytes(n, each);
      const Index block = node() * ulysses_, one = step(n).distances.begin * block;
      for (Index from = 0; from < ranks(); ++from)
        for (Index to = from % block; to < ranks(); to += block)
          if (schedule::meets_node(step(n)) ? to == (from + one) % ranks() : to != from)
            sent.push_back({from, to, bytes[at(from)]});
    }
    return listed(std::move(sent), back, step(n).move == Move::Kind::send);
  }
  // Rows of step n, whose heads are the same on all ranks.
  std::vector<Patterns::Sent> in_bytes(std::vector<Patterns::Sent> rows, Index n, double each) const {
    for (Patterns::Sent& s : rows) s.bytes *= sent_bytes(n, each);
    return rows;
  }
  double sent_bytes(Index n, double each) const { return static_cast<double>(places_.front().of(n).moved) * each; }
  // One way, or back, where it is added.
  Pattern listed(std::vector<Patterns::Sent> sent, bool back, bool uneven) const {
    if (back)
      for (Patterns::Sent& s : sent) std::swap(s.from, s.to);
    if (static_cast<Index>(sent.size()) > kMostMessages)
      throw Error(
          text(words(job_.schedule), " on ", ranks(), " ranks: ", sent.size(), " messages are too many to simulate"),
          "use fewer ranks, or larger nodes");
    return make_.listed(std::move(sent), back, uneven);
  }

  Pattern shift(Index n, Range distances, Index groups, double each, bool adds) override {
    const Index messages = ranks() * distances.size();
    listed_ += messages;
    if (messages > kMostMessages || listed_ > 2 * kMostMessages)
      throw Error(text(words(job_.schedule), " on ", ranks(), " ranks: ", max_of(messages, listed_),
                       " messages are too many to simulate"),
                  text("use up to ", kMostMessages / ranks(),
                       " ranks_per_step, or a schedule that gathers, which moves the same bytes"));
    std::vector<Patterns::Sent> sent;
    for (Index r = 0; r < ranks(); ++r) {
      const Index heads = places_[at(r % ulysses_)].of(n).moved;
      for (Index d = distances.begin; d < distances.end; ++d)
        sent.push_back({r, (r + d * spacing_) % ranks(), static_cast<double>(groups * group_rows() * heads) * each});
    }
    return make_.listed(std::move(sent), adds, false);
  }

  Pattern query_move(Index places, double bytes, bool back) const override {
    std::vector<Patterns::Sent> sent;
    for (Index r = 0; r < ranks(); ++r) sent.push_back({query_owner(r, places), r, bytes});
    return listed(std::move(sent), back, false);
  }

  Pattern send(Index n, double each, bool back) const override {
    if (relays()) return listed(in_bytes(hops_[at(first_alike(n))].pass, n, each), back, true);
    return make_.spans(messages_[at(first_alike(n))], o_.repeat, sent_bytes(n, each), back);
  }

  const Job& job_;
  Index skip_ = 1;  // of a group's members every so many-th is planned
  Patterns make_;
  std::vector<Place> places_;
  std::vector<Index> moved_;                                  // K/V rows of each group that a gather moves
  std::vector<std::shared_ptr<std::vector<Span>>> messages_;  // by step that moves what is seen
  std::vector<Hops> hops_;                                    // the same, in two hops
  struct Pending {
    Index rank = 0;
    std::vector<Index> rows;
    bool partial = false;
  };
  std::vector<Pending> pending_;      // ranks of the node at hand, whose relay buffers are not known yet
  std::vector<Item> items_, sorted_;  // of one group; members so as to reuse their memory
  std::vector<std::size_t> counts_;   // of items by place
  Index listed_ = 0;                  // messages so far
};

}  // namespace

Outline outline_of(const Job& job, const Machine& machine, Pass pass) { return JobOutline(job, machine, pass).make(); }

}  // namespace weft::cost
