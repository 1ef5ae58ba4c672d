#include "kernel/cuda/sm90/backward_turns.h"

#include <algorithm>
#include <numeric>

namespace weft::cuda::sm90 {

std::vector<int> number_turns(std::span<const int> items, std::span<WorkSlice> slices, int log_size, int tiles) {
  std::vector<int> turns, visits(static_cast<std::size_t>(tiles), 0);
  for (std::size_t i = 0; i < items.size(); i += 4)
    for (int m = items[i + 2]; m < items[i + 3]; ++m) {
      WorkSlice& s = slices[static_cast<std::size_t>(m)];
      const TileRange seen = tiles_seeing(s, items[i], items[i + 1], log_size);
      s.k_first = static_cast<int>(turns.size()) - seen.first;
      for (int t = seen.first; t <= seen.last; ++t) turns.push_back(visits[static_cast<std::size_t>(t)]++);
    }
  return turns;
}

std::vector<int> order_items(const std::vector<Index>& costs, Index heads, int processors, bool in_turn) {
  const Index of_head = std::accumulate(costs.begin(), costs.end(), Index{0}), time = of_head * heads / processors;
  const Index longest = costs.empty() ? 0 : *std::max_element(costs.begin(), costs.end());
  // Shorter ones end in time, or nearly; heads at once would have more dQ under way than the L2 cache holds.
  if (3 * longest <= time) return {};
  const std::size_t tiles = costs.size(), all = tiles * static_cast<std::size_t>(heads);
  std::vector<Index> start(all);
  Index before = 0;
  for (std::size_t i = 0; i < all; ++i) {
    const Index cost = costs[i % tiles];
    start[i] = min_of(before / processors, time - cost);
    before += cost;
  }
  if (in_turn)
    for (std::size_t i = all; i-- > 1;)
      if (i % tiles != 0) start[i - 1] = min_of(start[i - 1], start[i]);
  std::vector<int> order(all);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return start[static_cast<std::size_t>(a)] < start[static_cast<std::size_t>(b)]; });
  return order;
}

}  // namespace weft::cuda::sm90
