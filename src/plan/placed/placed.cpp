// The placed layout: what the sequences weigh, what the solver makes of it, and the runs of each rank.
#include "weft/placed.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "index.h"
#include "plan/layout_data.h"
#include "plan/placed/solver.h"
#include "text.h"
#include "weft/error.h"

namespace weft {
namespace {

using detail::Piece;
using detail::SequenceWork;

void check_options(const PlacedOptions& o) {
  if (o.node < 1) throw Error(text("nodes of ", o.node, " ranks"), "use at least one");
  if (o.head_groups < 1) throw Error(text(o.head_groups, " head groups"), "use at least one");
  if (o.capacity < 0) throw Error(text("a capacity of ", o.capacity, " rows"), "use rows of a rank, or 0");
  for (const double seconds : {o.pair_seconds, o.row_seconds, o.merge_seconds, o.near_seconds, o.far_seconds})
    if (!(seconds >= 0) || !std::isfinite(seconds))
      throw Error(text("a weight of ", seconds, " seconds"), "use weights from 0 on (placed_options)");
}

Index capacity_of(const Stream& stream, Index ranks, const PlacedOptions& options) {
  const Index tokens = stream.extent().size(), even = ceil_div(tokens, ranks);
  if (options.capacity == 0) return even + even / 16;
  if (options.capacity < even)
    throw Error(text("a capacity of ", options.capacity, " rows on ", ranks, " ranks, and ", tokens, " tokens"),
                text("use at least ", even, " rows, or more ranks"));
  return options.capacity;
}

// Pairs of each sequence, and how far its queries see.
std::vector<SequenceWork> weigh(const Problem& problem, const PlacedOptions& options) {
  const Stream &q = problem.packing().q(), &k = problem.packing().k();
  std::vector<SequenceWork> all(at(q.sequences()));
  for (Index i = 0; i < q.sequences(); ++i) {
    all[at(i)].rows = q.padded(i);
    all[at(i)].keys = k.padded(i);
    all[at(i)].seconds = options.row_seconds * static_cast<double>(q.used(i));
  }
  const std::vector<Slice> slices = problem.global_slices();
  detail::check_queries(slices, q);
  Index i = 0;  // the sequence that the last slice's queries began in: most slices come in the order of sequences
  for (const Slice& s : slices) {
    if (s.q_begin >= s.q_end) continue;
    if (s.q_begin < q.offset(i) || s.q_begin >= q.offset(i + 1))
      i = std::upper_bound(q.offsets().begin(), q.offsets().end(), s.q_begin) - q.offsets().begin() - 1;
    for (Index n = i; n < q.sequences() && q.offset(n) < s.q_end; ++n) {
      const Slice own = within_rows(s, {q.offset(n), q.offset(n) + q.used(n)});
      if (own.q_begin >= own.q_end) continue;
      const Range seen = touched_keys(own);
      const Index band = is_unlimited(s.lo) || is_unlimited(s.hi) ? seen.size() : s.hi - s.lo;
      SequenceWork& to = all[at(n)];
      to.seconds += options.pair_seconds * static_cast<double>(visible_pairs(own));
      to.reach = max_of(to.reach, min_of(band, seen.size()));
    }
  }
  return all;
}

// Runs of each rank: pieces in the order of tokens, neighbours joined.
class RankRuns {
 public:
  explicit RankRuns(Index ranks) : runs_(at(ranks)), rows_(at(ranks), 0) {}

  void add(Index rank, Index token, Index count) {
    std::vector<Run>& own = runs_[at(rank)];
    if (count == 0) return;
    if (!own.empty() && own.back().token + own.back().count == token)
      own.back().count += count;
    else
      own.push_back({rows_[at(rank)], token, count, 1});
    rows_[at(rank)] += count;
  }
  Index rows(Index rank) const { return rows_[at(rank)]; }
  Index longest() const { return rows_.empty() ? 0 : *std::max_element(rows_.begin(), rows_.end()); }
  std::vector<std::vector<Run>> take() { return std::move(runs_); }

 private:
  std::vector<std::vector<Run>> runs_;
  std::vector<Index> rows_;
};

RankRuns query_runs(const Stream& q, Index ranks, const std::vector<std::vector<Piece>>& pieces) {
  RankRuns runs(ranks);
  for (Index i = 0; i < q.sequences(); ++i)
    for (const Piece& p : pieces[at(i)]) runs.add(p.rank, q.offset(i) + p.begin, p.count);
  return runs;
}

std::vector<Index> ranks_of(const std::vector<Piece>& pieces) {
  std::vector<Index> ranks;
  for (const Piece& p : pieces) ranks.push_back(p.rank);
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

// Keys of another stream: equal parts on the ranks of the queries. Those that no query sees go where there are fewest.
RankRuns key_runs(const Stream& k, Index ranks, const std::vector<std::vector<Piece>>& pieces) {
  RankRuns runs(ranks);
  for (Index i = 0; i < k.sequences(); ++i) {
    std::vector<Index> on = ranks_of(pieces[at(i)]);
    if (on.empty()) {
      Index fewest = 0;
      for (Index r = 1; r < ranks && k.padded(i) > 0; ++r)
        if (runs.rows(r) < runs.rows(fewest)) fewest = r;
      on.push_back(fewest);
    }
    const Index parts = static_cast<Index>(on.size());
    for (Index n = 0; n < parts; ++n) {
      const Index begin = k.padded(i) * n / parts, end = k.padded(i) * (n + 1) / parts;
      runs.add(on[at(n)], k.offset(i) + begin, end - begin);
    }
  }
  return runs;
}

std::string counted(Index n, std::string_view what) { return text(n, " ", what, n == 1 ? "" : "s"); }

// The smallest and the largest of some numbers.
struct Extent {
  Index least = 0, most = 0, count = 0;

  void add(Index n) {
    least = count == 0 ? n : min_of(least, n);
    most = max_of(most, n);
    ++count;
  }
  std::string words() const { return least == most ? text(least) : text(least, " to ", most); }
};

}  // namespace

std::string_view name(PlacedSequence::Why why) {
  constexpr std::array<std::string_view, 4> names = {"whole", "work", "rows", "room"};
  return names[static_cast<std::size_t>(why)];
}

std::string Placement::why() const {
  using Why = PlacedSequence::Why;
  Extent in_node[4], over_nodes[4];
  Index whole = 0, placed = 0;
  for (const PlacedSequence& s : sequences) {
    if (s.ranks == 0) continue;
    ++placed;
    whole += s.ranks == 1;
    if (s.ranks > 1) (s.nodes == 1 ? in_node : over_nodes)[static_cast<std::size_t>(s.why)].add(s.ranks);
  }
  std::string out = text(whole, " of ", counted(placed, "sequence"), " whole on one rank");
  constexpr std::array<std::string_view, 4> reasons = {"", "to share their work", "as a rank cannot hold their rows",
                                                       "to fill the room that was left"};
  for (const Why why : {Why::work, Why::rows, Why::room}) {
    const std::size_t n = static_cast<std::size_t>(why);
    if (in_node[n].count > 0) out += text("; ", in_node[n].count, " on ", in_node[n].words(), " ranks of a node");
    if (over_nodes[n].count > 0)
      out += text(in_node[n].count > 0 ? ", " : "; ", over_nodes[n].count, " on ", over_nodes[n].words(),
                  " ranks of several nodes");
    if (in_node[n].count + over_nodes[n].count > 0) out += text(", ", reasons[n]);
  }
  return out + text("; at most ", layouts.q.rows(), " rows a rank, of ", capacity);
}

Placement place(const Problem& problem, Index ranks, const PlacedOptions& options) {
  detail::check_ranks(ranks);
  check_options(options);
  const Packing& packing = problem.packing();
  PlacedOptions set = options;
  set.capacity = capacity_of(packing.q(), ranks, options);
  const std::vector<SequenceWork> work = weigh(problem, options);
  const detail::Solution solved = detail::solve_placed(work, ranks, set);

  RankRuns q = query_runs(packing.q(), ranks, solved.pieces);
  const auto layout = [&](const Stream& stream, RankRuns& runs) {
    const Index rows = runs.longest();
    if (rows > 0 && ranks > kMaxTokens / rows)
      throw Error(text(ranks, " ranks of ", rows, " rows are past the limit of ", kMaxTokens, " rows"),
                  "use a smaller capacity, or fewer ranks");
    return Layout(detail::shared({LayoutKind::placed, stream, ranks, rows, 0, 1, runs.take()}));
  };
  Layout of_q = layout(packing.q(), q);
  const auto of_keys = [&] {
    RankRuns k = key_runs(packing.k(), ranks, solved.pieces);
    return layout(packing.k(), k);
  };
  Layout of_k = packing.self() ? of_q : of_keys();
  Placement out{.layouts = {std::move(of_q), std::move(of_k)}, .capacity = set.capacity, .seconds = solved.seconds};

  double total = 0;
  for (const SequenceWork& s : work) total += s.seconds;
  for (std::size_t n = 0; n < work.size(); ++n) {
    const std::vector<Index> on = ranks_of(solved.pieces[n]);
    PlacedSequence s{.ranks = static_cast<Index>(on.size()), .why = solved.why[n]};
    for (std::size_t r = 0; r < on.size(); ++r) s.nodes += r == 0 || on[r] / set.node != on[r - 1] / set.node;
    if (total > 0) s.work = work[n].seconds * static_cast<double>(ranks) / total;
    out.sequences.push_back(s);
  }
  return out;
}

Layout Layout::placed(const Problem& problem, Index ranks) { return place(problem, ranks).layouts.q; }
Layout Layout::placed(const Problem& problem, Index ranks, const PlacedOptions& options) {
  return place(problem, ranks, options).layouts.q;
}

}  // namespace weft
