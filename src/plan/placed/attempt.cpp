#include "plan/placed/attempt.h"

#include <algorithm>
#include <queue>

#include "index.h"

namespace weft::detail {
namespace {

double real(Index n) { return static_cast<double>(n); }

// Chunks of long sequences end at multiples of a tile, so that kernels' tiles are full, while a tile is at most 1/kFine
// of a rank's share; otherwise at multiples of half a tile, and so on.
constexpr Index kTile = 64, kFine = 64;

// Sequences of less than this share of a rank's target are placed by one queue of ranks: whole, as none of them can
// make much of a difference.
constexpr double kSmall = 0.2;

}  // namespace

Attempt::Attempt(std::span<const SequenceWork> sequences, std::span<const Index> order, Index ranks,
                 const PlacedOptions& options, const Trial& trial)
    : sequences_(sequences),
      ranks_(ranks),
      node_(min_of(options.node, ranks)),
      nodes_(ceil_div(ranks, node_)),
      options_(options),
      trial_(trial),
      load_(at(ranks), 0.0),
      rows_(at(ranks), 0),
      by_node_(at(nodes_)),
      whole_(sequences.size(), -1) {
  for (Index node = 0; node < nodes_; ++node) {
    for (Index r = ranks_of(node).begin; r < ranks_of(node).end; ++r) by_node_[at(node)].emplace_back(0.0, r);
    sort_node(node);
  }
  std::size_t n = 0;
  std::vector<Index> left;
  for (; n < order.size(); ++n) {
    const SequenceWork& s = of(order[n]);
    if (s.seconds <= kSmall * trial_.target && s.rows <= trial_.capacity) break;
    if (!(trial_.wide && spread(order[n], true)) && !spread(order[n], false)) left.push_back(order[n]);
  }
  for (const Index sequence : left) fill_gaps(sequence);
  place_whole(order.subspan(n));
  even_out();
}

// Ranks with many free rows will get more of the short sequences than others.
double Attempt::weight(Index rank) const { return load_[at(rank)] + trial_.filler * real(room(rank)); }

void Attempt::sort_node(Index node) {
  std::vector<Lightest>& ranks = by_node_[at(node)];
  for (auto& [seconds, rank] : ranks) seconds = weight(rank);
  std::sort(ranks.begin(), ranks.end());
}

void Attempt::add(Index rank, Index rows, double seconds) {
  load_[at(rank)] += seconds;
  rows_[at(rank)] += rows;
}

// Seconds of a sequence that is cut into two chunks for each of so many ranks: a query sees as many chunks on average,
// whose keys lie apart, and in each of them begins and ends tiles as if it were a sequence.
double Attempt::cut(const SequenceWork& s, Index ranks) const {
  return s.seconds + options_.row_seconds * real(s.rows) * real(ranks - 1);
}

// What a rank waits for the keys of a sequence that lies on so many ranks: it sees most of them, each node brings those
// of the others in once, and its ranks share that.
double Attempt::moving(const SequenceWork& s, Index ranks, Index nodes) const {
  if (ranks == 1) return 0;
  const double near = std::min(real(s.keys) * (1 - 1 / real(ranks)), 2 * real(s.reach));
  const double far = std::min(real(s.keys) * real(nodes - 1) / real(ranks), 2 * real(s.reach));
  return trial_.exposed * (near * options_.near_seconds + (nodes > 1 ? far * options_.far_seconds : 0));
}

// The `nodes` lightest nodes of which `of_node` ranks have room for a piece; a node weighs as the heaviest of those.
bool Attempt::nodes_with_room(Index piece, Index of_node, Index nodes, std::vector<Lightest>& found) const {
  found.clear();
  for (Index node = 0; node < nodes_; ++node) {
    Index count = 0;
    for (const auto& [seconds, rank] : by_node_[at(node)]) {
      if (room(rank) < piece || ++count < of_node) continue;
      found.emplace_back(seconds, node);
      break;
    }
  }
  if (static_cast<Index>(found.size()) < nodes) return false;
  std::nth_element(found.begin(), found.begin() + (nodes - 1), found.end());
  return true;
}

// The fewest ranks on which the sequence ends before the target, inside a node first; or those where it ends soonest.
bool Attempt::spread(Index sequence, bool wide) {
  const SequenceWork& s = of(sequence);
  const Index least =
      trial_.target > 0 ? max_of(1, min_of(ranks_, static_cast<Index>(s.seconds / trial_.target))) : Index{1};
  wide = wide && 2 * least >= node_;
  const Index fewest = wide && 2 * least >= ranks_ ? nodes_ : min_of(nodes_, ceil_div(least, node_));
  // A sequence of little work gains nothing from a second node.
  const Index most_nodes = s.seconds < trial_.target && s.rows <= node_ * trial_.capacity ? 1 : nodes_;
  std::vector<Lightest> found;
  Choice best;
  for (Index nodes = fewest; nodes <= most_nodes; ++nodes) {
    const double before = best.end;
    const bool any = best.nodes > 0;
    const Index from = wide ? node_ : nodes == 1 ? 1 : (nodes - 1) * node_ / nodes + 1;
    constexpr int kInVain = 2;  // more ranks that do not shorten it
    int in_vain = 0;
    for (Index of_node = max_of(from, least / nodes); of_node <= node_ && in_vain < kInVain; ++of_node) {
      const Index ranks = nodes * of_node, piece = ceil_div(s.rows, ranks);
      if (piece > trial_.capacity || !nodes_with_room(piece, of_node, nodes, found)) continue;
      const double end = found[at(nodes - 1)].first + cut(s, ranks) / real(ranks) + moving(s, ranks, nodes);
      const bool sooner = best.nodes == 0 || end < best.end;
      in_vain = sooner ? 0 : in_vain + 1;
      if (sooner) best = {end, nodes, of_node};
      if (end > trial_.target) continue;
      split_over(sequence, best);
      return true;
    }
    constexpr double kGain = 0.99;  // more nodes that do not shorten it by a percent are not worth a search
    if (any && best.end > kGain * before) break;
  }
  if (best.nodes == 0) return false;
  split_over(sequence, best);
  return true;
}

void Attempt::split_over(Index sequence, const Choice& choice) {
  const SequenceWork& s = of(sequence);
  const Index count = choice.nodes * choice.of_node, piece = ceil_div(s.rows, count);
  std::vector<Lightest> found;
  nodes_with_room(piece, choice.of_node, choice.nodes, found);
  Split split{.sequence = sequence, .ranks = {}, .share = {}, .nodes = choice.nodes};
  for (Index n = 0; n < choice.nodes; ++n) {
    Index taken = 0;
    for (const auto& [seconds, rank] : by_node_[at(found[at(n)].second)]) {
      if (room(rank) < piece || taken == choice.of_node) continue;
      split.ranks.push_back(rank);
      ++taken;
    }
  }
  std::sort(split.ranks.begin(), split.ranks.end());
  const double seconds = cut(s, count) / real(count) + moving(s, count, choice.nodes);
  for (Index n = 0; n < count; ++n) {
    split.share.push_back(s.rows / count + (n < s.rows % count ? 1 : 0));
    add(split.ranks[at(n)], split.share.back(), seconds);
  }
  for (Index n = 0; n < choice.nodes; ++n) sort_node(found[at(n)].second);
  if (count == 1)
    whole_[at(sequence)] = split.ranks.front();
  else
    splits_.push_back(std::move(split));
}

// Each to the lightest rank that has room for it.
void Attempt::place_whole(std::span<const Index> order) {
  std::priority_queue<Lightest, std::vector<Lightest>, std::greater<>> lightest;
  std::priority_queue<std::pair<Index, Index>> full;  // (room, rank): no room for the sequence at hand
  Index kept = trial_.capacity - trial_.filled;  // rows of each rank that these may not take, if they fit elsewhere
  Index exceptions = 0;
  const auto free = [&](Index rank) { return room(rank) - kept; };
  const auto sort_anew = [&] {  // rooms have changed
    lightest = {};
    full = {};
    for (Index r = 0; r < ranks_; ++r) full.emplace(free(r), r);
  };
  sort_anew();
  for (const Index sequence : order) {
    const SequenceWork& s = of(sequence);
    for (; !full.empty() && full.top().first >= s.rows; full.pop())
      lightest.emplace(weight(full.top().second), full.top().second);
    Index rank = -1;
    while (!lightest.empty() && rank < 0) {
      const Index r = lightest.top().second;
      lightest.pop();
      if (free(r) >= s.rows)
        rank = r;
      else
        full.emplace(free(r), r);
    }
    if (rank < 0) {
      rank = lightest_with_room(s.rows);
      if (rank < 0) {
        fill_gaps(sequence);
      } else {
        whole_[at(sequence)] = rank;
        add(rank, s.rows, s.seconds);
      }
      constexpr Index kExceptions = 64;  // each looks at all ranks
      if (++exceptions > kExceptions) kept = 0;
      sort_anew();
      continue;
    }
    whole_[at(sequence)] = rank;
    add(rank, s.rows, s.seconds);
    lightest.emplace(weight(rank), rank);
  }
}

Index Attempt::lightest_with_room(Index rows) const {
  Index best = -1;
  for (Index r = 0; r < ranks_; ++r)
    if (room(r) >= rows && (best < 0 || weight(r) < weight(best))) best = r;
  return best;
}

// Fits nowhere whole: the node with most room takes what it can, on as few of its ranks as that needs.
void Attempt::fill_gaps(Index sequence) {
  const SequenceWork& s = of(sequence);
  Split split{.sequence = sequence, .ranks = {}, .share = {}, .nodes = 0, .gaps = true};
  for (Index need = s.rows; need > 0; ++split.nodes) {
    Index best = 0, most = -1;
    for (Index node = 0; node < nodes_; ++node) {
      Index sum = 0;
      for (Index r = ranks_of(node).begin; r < ranks_of(node).end; ++r) sum += room(r);
      if (sum > most) {
        best = node;
        most = sum;
      }
    }
    std::vector<Lightest>& ranks = by_node_[at(best)];
    std::sort(ranks.begin(), ranks.end(), [&](const Lightest& a, const Lightest& b) {
      return room(a.second) != room(b.second) ? room(a.second) > room(b.second) : a.second < b.second;
    });
    for (const auto& [seconds, rank] : ranks) {
      const Index count = min_of(need, room(rank));
      if (count == 0) continue;
      split.ranks.push_back(rank);
      split.share.push_back(count);
      add(rank, count, s.seconds * real(count) / real(s.rows));
      need -= count;
    }
    sort_node(best);
  }
  if (split.ranks.size() == 1)
    whole_[at(sequence)] = split.ranks.front();
  else
    splits_.push_back(std::move(split));
}

// Under a causal mask two chunks as far from the two ends have work in proportion to their rows, whatever their length:
// so ranks with less other work take more rows of what lies on several.
void Attempt::even_out() {
  std::vector<std::size_t> order;
  for (std::size_t n = 0; n < splits_.size(); ++n)
    if (!splits_[n].gaps) order.push_back(n);
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const Index x = splits_[a].sequence, y = splits_[b].sequence;
    return of(x).rows != of(y).rows ? of(x).rows < of(y).rows : x < y;
  });
  constexpr int kRounds = 2;  // the second one mends what long sequences moved after short ones
  for (int round = 0; round < kRounds; ++round)
    for (const std::size_t n : order) share_out(splits_[n]);
}

void Attempt::share_out(Split& split) {
  const SequenceWork& s = of(split.sequence);
  const std::size_t count = split.ranks.size();
  const double a_row = cut(s, static_cast<Index>(count)) / real(s.rows),
               least = real(s.rows) / real(static_cast<Index>(count)) / 4;
  if (a_row <= 0) return;
  std::vector<double> base(count), wanted(count);
  std::vector<Index> most(count);
  double low = load_[at(split.ranks[0])], high = 0;
  for (std::size_t n = 0; n < count; ++n) {
    const Index rank = split.ranks[n];
    most[n] = room(rank) + split.share[n];
    base[n] = load_[at(rank)] - a_row * real(split.share[n]);
    low = std::min(low, base[n]);
    high = std::max(high, base[n] + a_row * real(s.rows));
  }
  const auto level = [&](double seconds) {  // fills all ranks up to it
    double sum = 0;
    for (std::size_t n = 0; n < count; ++n) {
      wanted[n] = std::min(real(most[n]), std::max(least, (seconds - base[n]) / a_row));
      sum += wanted[n];
    }
    return sum;
  };
  constexpr int kHalvings = 30;
  for (int n = 0; n < kHalvings; ++n) {
    const double middle = (low + high) / 2;
    (level(middle) < real(s.rows) ? low : high) = middle;
  }
  level(low);  // not more than all rows

  // Chunks end at whole tiles where that is little of a share: of a sequence with most of the work every row counts.
  Index unit = 2 * kTile;
  while (unit > 1 && s.rows < static_cast<Index>(count) * kFine * unit) unit /= 2;
  std::vector<Index> share(count);
  Index left = s.rows;
  for (std::size_t n = 0; n < count; ++n) {
    share[n] = min_of(left, static_cast<Index>(wanted[n]) / unit * unit);
    left -= share[n];
  }
  for (const bool whole_units : {true, false}) {  // what is left over
    for (std::size_t n = 0; n < count && left > 0; ++n) {
      const Index more = min_of(min_of(left, whole_units ? unit : left), most[n] - share[n]);
      if (whole_units && more < unit) continue;
      share[n] += more;
      left -= more;
    }
  }
  if (left > 0) return;  // the ranks are full: as it was
  for (std::size_t n = 0; n < count; ++n)
    add(split.ranks[n], share[n] - split.share[n], a_row * real(share[n] - split.share[n]));
  split.share = std::move(share);
}

}  // namespace weft::detail
