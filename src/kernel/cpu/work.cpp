#include "kernel/cpu/work.h"

#include <algorithm>
#include <tuple>

#include "index.h"

namespace weft::cpu {

std::vector<HeadGroup> head_groups(Index heads_q, Index heads_k, std::span<const Index> head_map) {
  std::vector<HeadGroup> groups(at(heads_k));
  for (Index h = 0; h < heads_k; ++h) groups[at(h)].kv_head = h;
  for (Index h = 0; h < heads_q; ++h) {
    const Index to = head_map.empty() ? h / (heads_q / heads_k) : head_map[at(h)];
    groups[at(to)].heads.push_back(h);
  }
  return groups;
}

Index largest_group(std::span<const HeadGroup> groups) {
  std::size_t largest = 1;
  for (const HeadGroup& g : groups) largest = std::max(largest, g.heads.size());
  return static_cast<Index>(largest);
}

std::vector<Slice> useful_slices(std::span<const Slice> slices) {
  std::vector<Slice> useful;
  for (const Slice& s : slices) {
    const Slice t = trimmed(s, false);
    if (t.q_begin < t.q_end) useful.push_back(t);
  }
  return useful;
}

std::vector<RowTile> row_tiles(std::span<const Slice> slices, Index rows, Index size) {
  std::vector<RowTile> tiles(at(ceil_div(rows, size)));
  for (std::size_t t = 0; t < tiles.size(); ++t) {
    const Index begin = static_cast<Index>(t) * size;
    tiles[t].rows = {begin, min_of(rows, begin + size)};
  }
  for (std::size_t n = 0; n < slices.size(); ++n) {
    const Slice& s = slices[n];
    for (Index t = s.q_begin / size; t * size < s.q_end; ++t) {
      RowTile& tile = tiles[at(t)];
      Slice part = s;
      part.q_begin = max_of(s.q_begin, tile.rows.begin);
      part.q_end = min_of(s.q_end, tile.rows.end);
      tile.slices.push_back(static_cast<Index>(n));
      tile.pairs += visible_pairs(part);
    }
  }
  return tiles;
}

std::vector<Item> forward_items(std::span<const RowTile> tiles, std::span<const HeadGroup> groups) {
  std::vector<Item> items;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const Index heads = static_cast<Index>(groups[g].heads.size());
    if (heads == 0) continue;
    for (std::size_t t = 0; t < tiles.size(); ++t)
      items.push_back({static_cast<Index>(t), static_cast<Index>(g), tiles[t].pairs * heads});
  }
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return std::tuple(b.cost, a.group, a.tile) < std::tuple(a.cost, b.group, b.tile);
  });
  return items;
}

}  // namespace weft::cpu
