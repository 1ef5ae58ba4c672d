#include "kernel/cuda/sm90/backward/dq_order.h"

#include <algorithm>
#include <numeric>

#include "index.h"

namespace weft::cuda::sm90 {

std::vector<int> number_additions(std::span<const int> items, std::span<WorkSlice> slices, int log2_size, int tiles) {
  std::vector<int> dq_order, visits(at(tiles), 0);
  for (std::size_t i = 0; i < items.size(); i += 4)
    for (int m = items[i + 2]; m < items[i + 3]; ++m) {
      WorkSlice& s = slices[at(m)];
      const TileRange seen = tiles_seeing(s, items[i], items[i + 1], log2_size);
      s.k_first = static_cast<int>(dq_order.size()) - seen.first;
      for (int t = seen.first; t <= seen.last; ++t) dq_order.push_back(visits[at(t)]++);
    }
  return dq_order;
}

std::vector<int> order_items(const std::vector<Index>& costs, Index heads, int sm_count) {
  const Index of_head = std::accumulate(costs.begin(), costs.end(), Index{0}), time = of_head * heads / sm_count;
  const Index longest = costs.empty() ? 0 : *std::max_element(costs.begin(), costs.end());
  // Shorter items end in time, or nearly. Several heads at once would have more dQ in flight than the L2 cache holds.
  if (3 * longest <= time) return {};
  const std::size_t tiles = costs.size(), all = tiles * at(heads);
  std::vector<Index> start(all);
  Index before = 0;
  for (std::size_t i = 0; i < all; ++i) {
    const Index cost = costs[i % tiles];
    start[i] = min_of(before / sm_count, time - cost);
    before += cost;
  }
  std::vector<int> order(all);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return start[at(a)] < start[at(b)]; });
  return order;
}

std::vector<int> spread_components(const std::vector<int>& items, std::vector<ComponentItems>& components,
                                   Index heads) {
  std::vector<int> spread;
  std::vector<ComponentItems> merged;
  for (std::size_t p = 0; p < components.size();) {
    const std::size_t end = std::min(components.size(), p + at(ceil_div(components[p].between, heads)));
    const int begin = static_cast<int>(spread.size());
    bool more = true;
    for (int n = 0; more; ++n) {
      more = false;
      for (std::size_t i = p; i < end; ++i) {
        if (components[i].begin + n >= components[i].end) continue;
        spread.push_back(items[at(components[i].begin + n)]);
        more = true;
      }
    }
    merged.push_back({begin, static_cast<int>(spread.size()), components[p].between});
    p = end;
  }
  components = std::move(merged);
  return spread;
}

std::vector<int> order_for_ordered_dq(const std::vector<ComponentItems>& components, Index heads) {
  std::vector<int> order;
  const int items = components.empty() ? 0 : components.back().end;
  for (std::size_t p = 0; p < components.size();) {
    const Index column_warps = min_of(components[p].between, heads);
    std::size_t end = p + 1;
    while (end < components.size() && min_of(components[end].between, heads) == column_warps) ++end;
    for (Index first = 0; first < heads; first += column_warps)
      for (int item = components[p].begin; item < components[end - 1].end; ++item)
        for (Index head = first; head < min_of(first + column_warps, heads); ++head)
          order.push_back(static_cast<int>(head) * items + item);
    p = end;
  }
  return order;
}

}  // namespace weft::cuda::sm90
