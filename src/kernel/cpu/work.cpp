#include "kernel/cpu/work.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "index.h"
#include "ranges.h"

namespace weft::cpu {
namespace {

// Which slices belong together, directly or through others.
class Sets {
 public:
  explicit Sets(std::size_t n) : parent_(n) { std::iota(parent_.begin(), parent_.end(), std::size_t{0}); }
  std::size_t root(std::size_t i) {
    while (parent_[i] != i) i = parent_[i] = parent_[parent_[i]];
    return i;
  }
  void join(std::size_t a, std::size_t b) { parent_[root(b)] = root(a); }

 private:
  std::vector<std::size_t> parent_;
};

// Joins slices whose ranges overlap.
template <class RangeOf>
void join_overlapping(Sets& sets, std::size_t n, RangeOf&& range) {
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](auto a, auto b) { return range(a).begin < range(b).begin; });
  Index end = -1;
  for (std::size_t i = 0; i < n; ++i) {
    const Range r = range(order[i]);
    if (i > 0 && r.begin < end) sets.join(order[i - 1], order[i]);
    end = i == 0 || r.begin >= end ? r.end : max_of(end, r.end);
  }
}

void place_keys(Component& c, std::span<const Slice> slices) {
  std::vector<Range> touched;
  for (const KeyPlace& p : c.slices) touched.push_back(touched_keys(slices[at(p.slice)]));
  c.keys = joined(touched);
  std::vector<Index> begins;  // of each range in the sums
  for (const Range& r : c.keys) {
    begins.push_back(c.sum_rows);
    c.sum_rows += r.size();
  }
  for (std::size_t i = 0; i < touched.size(); ++i) {
    const auto range = std::upper_bound(c.keys.begin(), c.keys.end(), touched[i].begin,
                                        [](Index key, const Range& r) { return key < r.begin; }) -
                       1;
    c.slices[i].shift = begins[at(range - c.keys.begin())] - range->begin;
  }
}

struct Block {
  Range rows;
  Index pairs = 0;
};

std::vector<Block> blocks_of(const Component& c, std::span<const Slice> slices, Index size) {
  std::vector<Range> rows;
  for (const KeyPlace& p : c.slices) {
    const Slice& s = slices[at(p.slice)];
    rows.push_back({s.q_begin, s.q_end});
  }
  std::vector<Block> blocks;
  for (const Range& r : joined(std::move(rows)))
    for (Index begin = r.begin; begin < r.end; begin += size) blocks.push_back({{begin, min_of(r.end, begin + size)}});
  for (const KeyPlace& p : c.slices) {
    Slice s = slices[at(p.slice)];
    auto b = std::upper_bound(blocks.begin(), blocks.end(), s.q_begin,
                              [](Index row, const Block& x) { return row < x.rows.end; });
    for (; b != blocks.end() && b->rows.begin < s.q_end; ++b) b->pairs += visible_pairs(within_rows(s, b->rows));
  }
  return blocks;
}

// Neighbouring blocks make a part, all parts about equal.
void cut_parts(Component& c, const std::vector<Block>& blocks, Index count) {
  Index done = 0, current = -1;
  for (const Block& b : blocks) {
    const Index part = min_of(count - 1, (done + b.pairs / 2) * count / max_of(1, c.pairs));
    if (part != current) c.parts.emplace_back();
    current = part;
    c.parts.back().blocks.push_back(b.rows);
    done += b.pairs;
  }
}

// Which sums the rows of a part touch.
void find_sums(Component& c, std::span<const Slice> slices) {
  for (RowPart& part : c.parts) {
    Range sums{c.sum_rows, 0};
    for (const KeyPlace& p : c.slices) {
      const Range rows{part.blocks.front().begin, part.blocks.back().end};
      const Range keys = touched_keys(within_rows(slices[at(p.slice)], rows));
      if (keys.size() > 0) sums = {min_of(sums.begin, keys.begin + p.shift), max_of(sums.end, keys.end + p.shift)};
    }
    part.sums = sums;
  }
}

}  // namespace

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
      tile.slices.push_back(static_cast<Index>(n));
      tile.pairs += visible_pairs(within_rows(s, tile.rows));
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

std::vector<Component> components(std::span<const Slice> slices, Index block, Index groups) {
  Sets sets(slices.size());
  join_overlapping(sets, slices.size(), [&](std::size_t i) { return Range{slices[i].q_begin, slices[i].q_end}; });
  join_overlapping(sets, slices.size(), [&](std::size_t i) { return touched_keys(slices[i]); });
  std::vector<Component> all;
  std::vector<std::size_t> of_root(slices.size(), slices.size());
  for (std::size_t i = 0; i < slices.size(); ++i) {
    std::size_t& component = of_root[sets.root(i)];
    if (component == slices.size()) {
      component = all.size();
      all.emplace_back();
    }
    all[component].slices.push_back({static_cast<Index>(i), 0});
  }
  Index total = 0;
  std::vector<std::vector<Block>> blocks;
  for (Component& c : all) {
    place_keys(c, slices);
    blocks.push_back(blocks_of(c, slices, block));
    for (const Block& b : blocks.back()) c.pairs += b.pairs;
    total += c.pairs;
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    // Divided first: pairs of a long stream times 16 could overflow.
    const Index sixteenth = max_of(1, total / ceil_div(16, groups));
    cut_parts(all[i], blocks[i], max_of(1, ceil_div(all[i].pairs, sixteenth)));
    find_sums(all[i], slices);
  }
  return all;
}

}  // namespace weft::cpu
