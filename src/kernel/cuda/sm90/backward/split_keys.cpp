#include "kernel/cuda/sm90/backward/split_keys.h"

#include <algorithm>

#include "index.h"

namespace weft::cuda::sm90 {
namespace {

// Rows of a slice that see keys [begin, end).
Index rows_seeing(const WorkSlice& s, int begin, int end) {
  const Index first_key = max_of(s.k_begin, begin), last_key = min_of(s.k_end, end) - 1;
  if (first_key > last_key) return 0;
  return max_of(0, min_of(s.q_end, last_key - s.lo + 1) - max_of(s.q_begin, first_key - s.hi));
}

// The slice's rows of tiles [first, end).
WorkSlice within_tiles(WorkSlice s, Index first, Index end, int log2_size) {
  s.q_begin = static_cast<int>(max_of(s.q_begin, (first << log2_size) - s.tile_shift));
  s.q_end = static_cast<int>(min_of(s.q_end, (end << log2_size) - s.tile_shift));
  return s;
}

}  // namespace

void split_long_tiles(KeyItems& items, Index most, int log2_size) {
  KeyItems to;
  const auto end_tile = [&](std::size_t t, Index cost) {
    to.ranges.insert(to.ranges.end(), {items.ranges[2 * t], items.ranges[2 * t + 1]});
    to.component.push_back(items.component[t]);
    to.cost.push_back(cost);
    to.begin.push_back(static_cast<int>(to.members.size()));
  };
  to.begin.push_back(0);
  for (std::size_t t = 0; t < items.tiles(); ++t) {
    const int key = items.ranges[2 * t], end = items.ranges[2 * t + 1];
    const auto first = items.members.begin() + items.begin[t], last = items.members.begin() + items.begin[t + 1];
    if (items.cost[t] <= most) {
      to.members.insert(to.members.end(), first, last);
      end_tile(t, items.cost[t]);
      continue;
    }
    Index all = 0;  // visits of query tiles
    for (auto s = first; s != last; ++s) {
      const TileRange seen = tiles_seeing(*s, key, end, log2_size);
      all += seen.last - seen.first + 1;
    }
    const Index each = ceil_div(all, ceil_div(items.cost[t], most));
    SplitTile split{key, end, to.part_count(), 0};
    Index room = 0, cost = 0;
    const auto end_part = [&] {
      if (split.parts > 0) end_tile(t, cost);
      cost = 0;
    };
    for (auto s = first; s != last; ++s) {
      const TileRange seen = tiles_seeing(*s, key, end, log2_size);
      for (Index tile = seen.first; tile <= seen.last;) {
        if (room == 0) {
          end_part();
          room = each;
          to.parts.resize(to.members.size() + 1, -1);
          to.parts.back() = split.first_part + split.parts++;
        }
        const Index count = min_of(room, seen.last - tile + 1);
        to.members.push_back(within_tiles(*s, tile, tile + count, log2_size));
        cost += rows_seeing(to.members.back(), key, end);
        tile += count;
        room -= count;
      }
    }
    end_part();
    to.split.push_back(split);
  }
  if (!to.split.empty()) to.parts.resize(to.members.size(), -1);
  items = std::move(to);
}

}  // namespace weft::cuda::sm90
