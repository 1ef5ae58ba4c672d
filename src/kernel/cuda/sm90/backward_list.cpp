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

BackwardWork from_host(const BackwardArgs& args, int size, const HeadGroups& heads, cudaStream_t stream) {
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
  return work;
}

}  // namespace

BackwardWork make_backward_work(const BackwardArgs& args, int log_size, int log_heads, cudaStream_t stream) {
  const HeadGroups heads{args.q.heads, args.k.heads, args.attention.head_map};
  BackwardWork work;
  if (args.device_plan == nullptr) {
    work = from_host(args, 1 << log_size, heads, stream);
  } else {
    const Tiling tilings[] = {{Side::query, args.q.rows, 1 << log_size}, {Side::key, args.k.rows, BackwardShape::kKeys}};
    work.lists = make_lists({}, args.device_plan, tilings, heads, stream);
    work.rows.list = work.lists.lists[0];
    work.rows.tiles = tilings[0].tiles();
    work.keys.list = work.lists.lists[1];
    work.keys.active = work.unseen_tiles = tilings[1].tiles();
    work.heads = work.lists.heads;
  }
  work.rows.log_size = log_size;
  work.rows.log_heads = log_heads;
  return work;
}

}  // namespace weft::cuda::sm90
