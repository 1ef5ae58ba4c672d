// The balanced layout: blocks of query tokens dealt out so that every rank sees about as many pairs.
#include <algorithm>
#include <limits>
#include <queue>
#include <set>
#include <utility>

#include "index.h"
#include "plan/layout_data.h"
#include "plan/row_pairs.h"
#include "text.h"
#include "weft/plan.h"

namespace weft {
namespace {

// Blocks of `size` tokens, then `ranks` blocks of `last` tokens, so that (per_rank - 1) of the first kind and one of
// the second make exactly a rank's rows.
struct Blocks {
  Index begin, end;  // tokens dealt out
  Index size, last, per_rank, ranks;

  Index full() const { return (per_rank - 1) * ranks; }
  Index count() const { return per_rank * ranks; }
  Range tokens(Index n) const {
    const Index from = n < full() ? n * size : full() * size + (n - full()) * last;
    return {min_of(end, begin + from), min_of(end, begin + from + (n < full() ? size : last))};
  }
};

std::vector<Index> weights(const Blocks& blocks, const RowPairs& pairs) {
  std::vector<Index> weight(at(blocks.count()), 0);
  for (Index n = 0; n < blocks.count(); ++n) weight[at(n)] = pairs.of(blocks.tokens(n));
  return weight;
}

struct Deal {
  std::vector<std::vector<Index>> blocks;  // by rank; the last one is of the second kind
  std::vector<Index> load;                 // by rank
  Index largest() const { return *std::max_element(load.begin(), load.end()); }
};

// Blocks of the first kind, heaviest first, each to the lightest rank that has room; then those of the second kind, one
// for each rank, the heaviest to the lightest.
Deal deal_out(const Blocks& blocks, const std::vector<Index>& weight) {
  std::vector<std::pair<Index, Index>> order;  // minus its weight, and the block: sorts the heaviest first
  order.reserve(weight.size());
  for (Index n = 0; n < blocks.count(); ++n) order.emplace_back(-weight[at(n)], n);
  std::sort(order.begin(), order.begin() + blocks.full());
  std::sort(order.begin() + blocks.full(), order.end());

  const std::size_t ranks = at(blocks.ranks);
  Deal deal{std::vector<std::vector<Index>>(ranks), std::vector<Index>(ranks, 0)};
  for (std::vector<Index>& own : deal.blocks) own.reserve(at(blocks.per_rank));
  std::priority_queue<std::pair<Index, Index>, std::vector<std::pair<Index, Index>>, std::greater<>> lightest;
  const auto refill = [&] {
    for (Index r = 0; r < blocks.ranks; ++r) lightest.emplace(deal.load[at(r)], r);
  };
  refill();
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (static_cast<Index>(i) == blocks.full()) {
      lightest = {};
      refill();
    }
    const std::size_t r = at(lightest.top().second);
    lightest.pop();
    deal.blocks[r].push_back(order[i].second);
    deal.load[r] -= order[i].first;
    if (static_cast<Index>(deal.blocks[r].size()) < blocks.per_rank - 1)
      lightest.emplace(deal.load[r], static_cast<Index>(r));
  }
  return deal;
}

// Moves load from the heaviest rank to light ones by swapping blocks of the same kind, while that lowers the larger of
// the two loads.
class LoadBalancer {
 public:
  LoadBalancer(Deal& deal, const std::vector<Index>& weight) : deal_(deal), weight_(weight) {
    for (std::size_t r = 0; r < deal.blocks.size(); ++r) sort_blocks(r);
  }

  void run(Index target) {
    for (std::size_t r = 0; r < deal_.load.size(); ++r) by_load_.emplace(deal_.load[r], r);
    for (std::size_t step = 0; step < 64 + 8 * deal_.load.size(); ++step) {
      const std::size_t heaviest = std::prev(by_load_.end())->second;
      if (deal_.load[heaviest] <= target || !relieve(heaviest)) return;
    }
  }

 private:
  Index w(Index block) const { return weight_[at(block)]; }

  // Swaps a block with one of the lightest ranks; returns false if no swap helps.
  bool relieve(std::size_t heaviest) {
    constexpr int kPartners = 16;
    auto light = by_load_.begin();
    for (int n = 0; n < kPartners && light != by_load_.end(); ++n, ++light) {
      const std::size_t other = light->second;
      const Index before[] = {deal_.load[heaviest], deal_.load[other]};
      if (!swap_one(heaviest, other)) continue;
      move(before[0], heaviest);
      move(before[1], other);
      return true;
    }
    return false;
  }

  void move(Index before, std::size_t rank) {
    auto node = by_load_.extract({before, rank});
    node.value().first = deal_.load[rank];
    by_load_.insert(std::move(node));
  }

  // Heaviest first; the last block is of the other kind and stays last.
  void sort_blocks(std::size_t rank) {
    std::vector<Index>& own = deal_.blocks[rank];
    std::sort(own.begin(), own.end() - 1, [&](Index x, Index y) { return std::pair(w(y), x) < std::pair(w(x), y); });
  }

  // Swaps the pair whose difference is nearest to half the gap between the two ranks.
  bool swap_one(std::size_t a, std::size_t b) {
    const Index gap = deal_.load[a] - deal_.load[b];
    std::vector<Index>&from = deal_.blocks[a], &to = deal_.blocks[b];
    Index best = gap;
    std::size_t best_i = 0, best_j = 0;
    const auto consider = [&](std::size_t i, std::size_t j) {
      const Index change = w(from[i]) - w(to[j]);
      const Index miss = change * 2 > gap ? change * 2 - gap : gap - change * 2;
      if (change <= 0 || change >= gap || miss >= best) return;
      best = miss;
      best_i = i;
      best_j = j;
    };
    const std::size_t last = from.size() - 1;
    for (std::size_t i = 0, j = 0; i < last; ++i) {
      // Both lists fall, so the partner of the next block is never before this one's.
      while (j + 1 < last && w(to[j]) * 2 > w(from[i]) * 2 - gap) ++j;
      consider(i, j);
      if (j > 0) consider(i, j - 1);
    }
    consider(last, last);
    if (best >= gap) return false;
    const Index change = w(from[best_i]) - w(to[best_j]);
    deal_.load[a] -= change;
    deal_.load[b] += change;
    std::swap(from[best_i], to[best_j]);
    sort_blocks(a);
    sort_blocks(b);
    return true;
  }

  Deal& deal_;
  const std::vector<Index>& weight_;
  std::set<std::pair<Index, std::size_t>> by_load_;  // (load, rank)
};

// What blocks cost kernels beside their pairs, in pairs. Keys of a block lie apart from those of the next one, so that
// queries that see both meet half a tile of keys more for each block. Sequences, or windows, of fewer keys than a block
// has are not cut, or not often.
class TileWaste {
 public:
  explicit TileWaste(std::span<const Slice> slices) {
    for (const Slice& s : slices) {
      const Index pairs = visible_pairs(s);
      if (pairs > 0) by_width_.emplace_back(touched_keys(s).size(), pairs);
    }
    std::sort(by_width_.begin(), by_width_.end());
    Index sum = 0;
    for (auto wide = by_width_.rbegin(); wide != by_width_.rend(); ++wide) wide->second = sum += wide->second;
  }

  // Of all queries, with blocks of so many keys.
  Index of(Index size) const {
    // About half of what kernels of GPUs walk at a time (64 to 176 keys); those of CPUs walk 32 to 96.
    constexpr Index kHalfTile = 64;
    const auto wide = std::upper_bound(by_width_.begin(), by_width_.end(), std::pair(size, kMaxPairs));
    return wide == by_width_.end()
               ? 0
               : static_cast<Index>(static_cast<double>(wide->second) * kHalfTile / static_cast<double>(size));
  }

 private:
  static constexpr Index kMaxPairs = std::numeric_limits<Index>::max();
  std::vector<std::pair<Index, Index>>
      by_width_;  // keys that a slice touches; pairs of those that touch as many or more
};

std::vector<Run> runs_of(const Blocks& blocks, std::vector<Index> own) {
  std::sort(own.begin(), own.end());
  std::vector<Run> runs;
  Index row = 0;
  for (const Index n : own) {
    const Range t = blocks.tokens(n);
    if (t.size() == 0) continue;
    if (!runs.empty() && runs.back().token + runs.back().count == t.begin)
      runs.back().count += t.size();
    else
      runs.push_back({row, t.begin, t.size(), 1});
    row += t.size();
  }
  return runs;
}

}  // namespace

void detail::check_queries(std::span<const Slice> slices, const Stream& stream) {
  const Range dealt = stream.extent();
  for (const Slice& s : slices) {
    if (s.q_begin < dealt.begin || s.q_end > dealt.end)
      throw Error(text("a slice has queries ", s.q_begin, ":", s.q_end, " outside the sequences' ", dealt.begin, ":",
                       dealt.end),
                  "keep slices inside the sequences");
  }
}

Layout Layout::balanced(const Problem& problem, Index ranks) {
  const Stream& stream = problem.packing().q();
  const Range dealt = stream.extent();
  const Index rows = contiguous(stream, ranks).rows();
  const std::vector<Slice> slices = problem.global_slices();
  detail::check_queries(slices, stream);
  const RowPairs pairs(slices);
  const Index total = pairs.of(dealt);
  const Index target = total / ranks + total / ranks / 200;  // an imbalance of 1.005 is good enough
  // Keys of another stream are not cut, and ranks of fewer rows than a tile fill none.
  constexpr Index kTile = 128;
  const bool fills_tiles = problem.packing().self() && rows >= kTile;
  const TileWaste waste(fills_tiles ? std::span(slices) : std::span<const Slice>{});

  // Small blocks are more even, large ones fill more of their tiles: what takes the busiest rank least is taken.
  Deal best;
  Blocks best_blocks{};
  Index best_cost = 0;
  for (const Index per_rank : {2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256}) {
    const Index size = max_of(1, ceil_div(rows, per_rank)), wasted = waste.of(size) / ranks;
    if (!best.load.empty() && total / ranks + wasted >= best_cost) break;  // smaller blocks waste more
    const Index n = max_of(1, ceil_div(rows, size));
    const Blocks blocks{dealt.begin, dealt.end, size, max_of(1, rows - (n - 1) * size), n, ranks};
    const std::vector<Index> weight = weights(blocks, pairs);
    Deal deal = deal_out(blocks, weight);
    LoadBalancer(deal, weight).run(target);
    if (const Index cost = deal.largest() + wasted; best.load.empty() || cost < best_cost) {
      best = std::move(deal);
      best_blocks = blocks;
      best_cost = cost;
    }
    if (best.largest() <= target || size == 1) break;
  }
  std::vector<std::vector<Run>> runs;
  for (std::vector<Index>& own : best.blocks) runs.push_back(runs_of(best_blocks, std::move(own)));
  return Layout(detail::shared({LayoutKind::balanced, stream, ranks, rows, 0, 1, std::move(runs)}));
}

}  // namespace weft
