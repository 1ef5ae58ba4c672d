#include "kernel/cuda/sm90/backward/dq_order.h"

#include <algorithm>
#include <numeric>

#include "index.h"

namespace weft::cuda::sm90 {

std::vector<int> number_turns(std::span<const int> items, std::span<WorkSlice> slices, int log_size, int tiles) {
  std::vector<int> turns, visits(at(tiles), 0);
  for (std::size_t i = 0; i < items.size(); i += 4)
    for (int m = items[i + 2]; m < items[i + 3]; ++m) {
      WorkSlice& s = slices[at(m)];
      const TileRange seen = tiles_seeing(s, items[i], items[i + 1], log_size);
      s.k_first = static_cast<int>(turns.size()) - seen.first;
      for (int t = seen.first; t <= seen.last; ++t) turns.push_back(visits[at(t)]++);
    }
  return turns;
}

std::vector<int> order_items(const std::vector<Index>& costs, Index heads, int processors) {
  const Index of_head = std::accumulate(costs.begin(), costs.end(), Index{0}), time = of_head * heads / processors;
  const Index longest = costs.empty() ? 0 : *std::max_element(costs.begin(), costs.end());
  // Shorter ones end in time, or nearly; heads at once would have more dQ under way than the L2 cache holds.
  if (3 * longest <= time) return {};
  const std::size_t tiles = costs.size(), all = tiles * at(heads);
  std::vector<Index> start(all);
  Index before = 0;
  for (std::size_t i = 0; i < all; ++i) {
    const Index cost = costs[i % tiles];
    start[i] = min_of(before / processors, time - cost);
    before += cost;
  }
  std::vector<int> order(all);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return start[at(a)] < start[at(b)]; });
  return order;
}

std::vector<int> spread_parts(const std::vector<int>& items, std::vector<PartItems>& parts, Index heads) {
  std::vector<int> spread;
  std::vector<PartItems> bundles;
  for (std::size_t p = 0; p < parts.size();) {
    const std::size_t end = std::min(parts.size(), p + at(ceil_div(parts[p].between, heads)));
    const int begin = static_cast<int>(spread.size());
    bool more = true;
    for (int n = 0; more; ++n) {
      more = false;
      for (std::size_t i = p; i < end; ++i) {
        if (parts[i].begin + n >= parts[i].end) continue;
        spread.push_back(items[at(parts[i].begin + n)]);
        more = true;
      }
    }
    bundles.push_back({begin, static_cast<int>(spread.size()), parts[p].between});
    p = end;
  }
  parts = std::move(bundles);
  return spread;
}

std::vector<int> order_in_turn(const std::vector<PartItems>& parts, Index heads) {
  std::vector<int> order;
  const int items = parts.empty() ? 0 : parts.back().end;
  for (std::size_t p = 0; p < parts.size();) {
    const Index beside = min_of(parts[p].between, heads);
    std::size_t end = p + 1;
    while (end < parts.size() && min_of(parts[end].between, heads) == beside) ++end;
    for (Index first = 0; first < heads; first += beside)
      for (int item = parts[p].begin; item < parts[end - 1].end; ++item)
        for (Index head = first; head < min_of(first + beside, heads); ++head)
          order.push_back(static_cast<int>(head) * items + item);
    p = end;
  }
  return order;
}

}  // namespace weft::cuda::sm90
