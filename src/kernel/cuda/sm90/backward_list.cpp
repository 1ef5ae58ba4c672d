#include "kernel/cuda/sm90/backward_list.h"

#include <algorithm>
#include <numeric>

namespace weft::cuda::sm90 {
namespace {

// Rows that overlapping slices hold together, cut into tiles.
struct Part {
  int begin, end;
  int first_tile;
};
struct Cut {
  std::vector<int> ranges;   // of tiles: begin and end
  std::vector<Part> parts;   // without those that no slice holds
  std::vector<int> part_of;  // of each slice
  int tiles() const { return static_cast<int>(ranges.size() / 2); }
};

// Tiles of at most `size` rows over all `rows`; those of rows that no slice holds end with ~end if `mark`.
Cut cut_rows(const std::vector<Range>& spans, int rows, int size, bool mark) {
  Cut cut;
  cut.part_of.resize(spans.size());
  std::vector<std::size_t> order(spans.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return spans[a].begin < spans[b].begin; });
  const auto add = [&](int begin, int end, bool held) {
    for (; begin < end; begin += size) {
      const int stop = std::min(begin + size, end);
      cut.ranges.insert(cut.ranges.end(), {begin, held || !mark ? stop : ~stop});
    }
  };
  int end = 0;
  for (std::size_t i = 0; i < order.size();) {
    const int begin = static_cast<int>(spans[order[i]].begin);
    add(end, begin, false);
    end = begin;
    const int part = static_cast<int>(cut.parts.size());
    for (; i < order.size() && (spans[order[i]].begin < end || end == begin); ++i) {
      end = std::max(end, static_cast<int>(spans[order[i]].end));
      cut.part_of[order[i]] = part;
    }
    cut.parts.push_back({begin, end, cut.tiles()});
    add(begin, end, true);
  }
  add(end, rows, false);
  return cut;
}

// Items of dQ: `tiles` tiles of rows each, the most expensive first, and their slices.
struct DqItems {
  std::vector<int> items, slices;
};
void append(std::vector<int>& to, const WorkSlice& s) {
  to.insert(to.end(), {s.q_begin, s.q_end, s.k_begin, s.k_end, s.k_first, s.lo, s.hi, s.unused});
}
DqItems cut_dq(const std::vector<WorkSlice>& slices, const Cut& rows, int tiles) {
  std::vector<std::vector<std::size_t>> of_part(rows.parts.size());
  for (std::size_t n = 0; n < slices.size(); ++n) of_part[static_cast<std::size_t>(rows.part_of[n])].push_back(n);
  DqItems made;
  std::vector<DqItem> items;
  std::vector<Index> cost;
  const auto end_of = [&](int tile) {
    const int end = rows.ranges[2 * static_cast<std::size_t>(tile) + 1];
    return end < 0 ? ~end : end;
  };
  std::size_t part = 0;
  for (int tile = 0; tile < rows.tiles();) {
    const int begin = rows.ranges[2 * static_cast<std::size_t>(tile)];
    while (part < rows.parts.size() && rows.parts[part].end <= begin) ++part;
    const bool held = part < rows.parts.size() && rows.parts[part].begin <= begin;
    const int limit = held ? rows.parts[part].end : part < rows.parts.size() ? rows.parts[part].begin : end_of(rows.tiles() - 1);
    int last = tile;
    while (last + 1 < rows.tiles() && last + 1 < tile + tiles && end_of(last + 1) <= limit) ++last;
    DqItem item{begin, end_of(last), static_cast<int>(made.slices.size() * sizeof(int) / sizeof(WorkSlice)), 0, tile};
    cost.push_back(0);
    for (const std::size_t n : held ? of_part[part] : std::vector<std::size_t>{}) {
      const WorkSlice& s = slices[n];
      const Index first_row = max_of(s.q_begin, item.begin), last_row = min_of(s.q_end, item.end) - 1;
      if (first_row > last_row) continue;
      append(made.slices, s);
      cost.back() += min_of(s.k_end, last_row + s.hi + 1) - max_of(s.k_begin, first_row + s.lo);
    }
    item.last = static_cast<int>(made.slices.size() * sizeof(int) / sizeof(WorkSlice));
    items.push_back(item);
    tile = last + 1;
  }
  std::vector<std::size_t> order(items.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return cost[a] > cost[b]; });
  for (const std::size_t n : order) {
    const DqItem& i = items[n];
    made.items.insert(made.items.end(), {i.begin, i.end, i.first, i.last, i.tile, 0, 0, 0});
  }
  return made;
}

BackwardWork from_host(const BackwardArgs& args, int size, const HeadGroups& heads, int tiles_of_dq,
                       cudaStream_t stream) {
  constexpr int kKeys = BackwardShape::kKeys;
  std::vector<WorkSlice> slices;
  std::vector<Range> q_spans, k_spans;
  for (const Slice& given : args.slices) {
    const WorkSlice s = work_slice(given);
    if (s.q_begin >= s.q_end) continue;
    slices.push_back(s);
    q_spans.push_back({s.q_begin, s.q_end});
    k_spans.push_back({s.k_begin, s.k_end});
  }
  const Cut rows = cut_rows(q_spans, static_cast<int>(args.q.rows), size, true);
  const Cut keys = cut_rows(k_spans, static_cast<int>(args.k.rows), kKeys, false);
  const std::size_t tiles = static_cast<std::size_t>(keys.tiles());

  std::vector<int> begin(tiles + 1, 0);
  std::vector<Index> cost(tiles, 0), part_cost(keys.parts.size(), 0);
  std::vector<int> part_of_tile(tiles, 0);
  const auto each = [&](auto&& visit) {
    for (std::size_t n = 0; n < slices.size(); ++n) {
      const WorkSlice& s = slices[n];
      const Part& part = keys.parts[static_cast<std::size_t>(keys.part_of[n])];
      const int first = part.first_tile + (s.k_begin - part.begin) / kKeys;
      const int last = part.first_tile + (s.k_end - 1 - part.begin) / kKeys;
      for (int t = first; t <= last; ++t) visit(n, static_cast<std::size_t>(t));
    }
  };
  each([&](std::size_t n, std::size_t t) {
    const WorkSlice& s = slices[n];
    const Index first = max_of(s.k_begin, keys.ranges[2 * t]), last = min_of(s.k_end, keys.ranges[2 * t + 1]) - 1;
    const Index seeing = min_of(s.q_end, last - s.lo + 1) - max_of(s.q_begin, first - s.hi);
    ++begin[t + 1];
    cost[t] += seeing;
    const std::size_t part = static_cast<std::size_t>(keys.part_of[n]);
    part_cost[part] += seeing;
    part_of_tile[t] = keys.part_of[n];
  });
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  constexpr std::size_t kInts = sizeof(WorkSlice) / sizeof(int);
  std::vector<int> members(static_cast<std::size_t>(begin.back()) * kInts), next(begin.begin(), begin.end() - 1);
  each([&](std::size_t n, std::size_t t) {
    WorkSlice s = slices[n];
    const Part& part = rows.parts[static_cast<std::size_t>(rows.part_of[n])];
    s.unused = part.first_tile * size - part.begin;
    const int numbers[kInts] = {s.q_begin, s.q_end, s.k_begin, s.k_end, s.k_first, s.lo, s.hi, s.unused};
    std::copy(numbers, numbers + kInts, members.begin() + next[t]++ * static_cast<std::ptrdiff_t>(kInts));
  });
  std::vector<int> order;
  for (std::size_t t = 0; t < tiles; ++t)
    if (begin[t] < begin[t + 1]) order.push_back(static_cast<int>(t));
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    const std::size_t x = static_cast<std::size_t>(a), y = static_cast<std::size_t>(b);
    const std::size_t px = static_cast<std::size_t>(part_of_tile[x]), py = static_cast<std::size_t>(part_of_tile[y]);
    if (px != py) return part_cost[px] != part_cost[py] ? part_cost[px] > part_cost[py] : px < py;
    return cost[x] > cost[y];
  });
  std::vector<int> items, unseen;
  for (const int t : order) {
    const std::size_t x = static_cast<std::size_t>(t);
    items.insert(items.end(), {keys.ranges[2 * x], keys.ranges[2 * x + 1], begin[x], begin[x + 1]});
  }
  for (std::size_t t = 0; t < tiles; ++t)
    if (begin[t] == begin[t + 1]) unseen.insert(unseen.end(), {keys.ranges[2 * t], keys.ranges[2 * t + 1]});

  HostLists lists({});
  lists.add_heads(heads.heads_q, heads.heads_k, heads.map);
  const std::size_t members_at = lists.add_numbers(members), items_at = lists.add_numbers(items),
                    unseen_at = lists.add_numbers(unseen), rows_at = lists.add_numbers(rows.ranges);
  DqItems dq;
  if (tiles_of_dq > 0) dq = cut_dq(slices, rows, tiles_of_dq);
  const std::size_t dq_at = lists.add_numbers(dq.items), dq_slices_at = lists.add_numbers(dq.slices);
  BackwardWork work;
  work.memory = upload(lists.numbers(), stream);
  const int* base = work.memory.get();
  work.keys.list.slices = reinterpret_cast<const WorkSlice*>(base + members_at);
  work.keys.items = reinterpret_cast<const int4*>(base + items_at);
  work.keys.active = static_cast<int>(order.size());
  work.unseen = reinterpret_cast<const int2*>(base + unseen_at);
  work.unseen_tiles = static_cast<int>(unseen.size() / 2);
  work.rows.ranges = reinterpret_cast<const int2*>(base + rows_at);
  work.rows.tiles = rows.tiles();
  work.heads = lists.heads(base);
  work.dq_items = reinterpret_cast<const DqItem*>(base + dq_at);
  work.dq_slices = reinterpret_cast<const WorkSlice*>(base + dq_slices_at);
  work.dq_active = static_cast<int>(dq.items.size() * sizeof(int) / sizeof(DqItem));
  return work;
}

}  // namespace

BackwardWork make_backward_work(const BackwardArgs& args, int log_size, int log_heads, int tiles_of_dq,
                                cudaStream_t stream) {
  const HeadGroups heads{args.q.heads, args.k.heads, args.attention.head_map};
  BackwardWork work;
  if (args.device_plan == nullptr) {
    work = from_host(args, 1 << log_size, heads, tiles_of_dq, stream);
  } else {
    work.rows.listed = tiles_of_dq > 0 ? tiles_of_dq : 1;
    const Tiling tilings[] = {{Side::query, args.q.rows, work.rows.listed << log_size},
                              {Side::key, args.k.rows, BackwardShape::kKeys}};
    work.lists = make_lists({}, args.device_plan, tilings, heads, stream);
    work.rows.list = work.lists.lists[0];
    work.rows.tiles = static_cast<int>(ceil_div(args.q.rows, Index{1} << log_size));
    work.dq_active = tilings[0].tiles();
    work.keys.list = work.lists.lists[1];
    work.keys.active = work.unseen_tiles = tilings[1].tiles();
    work.heads = work.lists.heads;
  }
  work.rows.log_size = log_size;
  work.rows.log_heads = log_heads;
  return work;
}

}  // namespace weft::cuda::sm90
