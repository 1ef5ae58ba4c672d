#include "kernel/cuda/sm90/backward/work.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "index.h"
#include "kernel/cuda/sm90/backward/dq_order.h"

namespace weft::cuda::sm90 {
namespace {

// Cuts all `rows` into tiles of at most `size` rows. Tiles of rows in no slice end with ~end if `mark`.
Cut cut_rows(const std::vector<Range>& spans, int rows, int size, bool mark) {
  Cut cut;
  cut.component_of.resize(spans.size());
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
    const int component = static_cast<int>(cut.components.size());
    for (; i < order.size() && (spans[order[i]].begin < end || end == begin); ++i) {
      end = std::max(end, static_cast<int>(spans[order[i]].end));
      cut.component_of[order[i]] = component;
    }
    cut.components.push_back({begin, end, cut.tiles()});
    add(begin, end, true);
  }
  add(end, rows, false);
  return cut;
}

std::span<const int> numbers_of(const std::vector<WorkSlice>& slices) {
  return {reinterpret_cast<const int*>(slices.data()), slices.size() * sizeof(WorkSlice) / sizeof(int)};
}

// Items of the separate dQ kernel, `tiles` query tiles each, in the order of rows and without slices.
std::vector<DqItem> cut_dq_rows(const Cut& rows, int tiles) {
  std::vector<DqItem> items;
  const auto end_of = [&](int tile) {
    const int end = rows.ranges[2 * at(tile) + 1];
    return end < 0 ? ~end : end;
  };
  std::size_t component = 0;
  for (int tile = 0; tile < rows.tiles();) {
    const int begin = rows.ranges[2 * at(tile)];
    while (component < rows.components.size() && rows.components[component].end <= begin) ++component;
    const bool held = component < rows.components.size() && rows.components[component].begin <= begin;
    const int limit = held                                 ? rows.components[component].end
                      : component < rows.components.size() ? rows.components[component].begin
                                                           : end_of(rows.tiles() - 1);
    int last = tile;
    while (last + 1 < rows.tiles() && last + 1 < tile + tiles && end_of(last + 1) <= limit) ++last;
    items.push_back({begin, end_of(last), 0, 0, tile});
    tile = last + 1;
  }
  return items;
}

// The items with their slices, the most expensive first.
struct DqItems {
  std::vector<int> items;
  std::vector<WorkSlice> slices;
};
DqItems cut_dq(const std::vector<WorkSlice>& slices, const Cut& rows, int tiles) {
  std::vector<DqItem> items = cut_dq_rows(rows, tiles);
  std::vector<Index> cost(items.size(), 0);
  // Each slice with the items of its rows, without a look at the others: trees have thousands of both.
  const auto each = [&](const auto& visit) {
    for (const WorkSlice& s : slices) {
      const auto first =
          std::partition_point(items.begin(), items.end(), [&](const DqItem& item) { return item.end <= s.q_begin; });
      for (auto item = first; item != items.end() && item->begin < s.q_end; ++item)
        visit(s, *item, at(item - items.begin()));
    }
  };
  each([&](const WorkSlice& s, DqItem& item, std::size_t n) {
    const Index first_row = max_of(s.q_begin, item.begin), last_row = min_of(s.q_end, item.end) - 1;
    ++item.last;
    cost[n] += min_of(s.k_end, last_row + s.hi + 1) - max_of(s.k_begin, first_row + s.lo);
  });
  int count = 0;
  for (DqItem& item : items) {
    item.first = count;
    count += item.last;
    item.last = item.first;
  }
  DqItems work{{}, std::vector<WorkSlice>(at(count))};
  each([&](const WorkSlice& s, DqItem& item, std::size_t) { work.slices[at(item.last++)] = s; });
  std::vector<std::size_t> order(items.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return cost[a] > cost[b]; });
  for (const std::size_t n : order) {
    const DqItem& i = items[n];
    work.items.insert(work.items.end(), {i.begin, i.end, i.first, i.last, i.tile, 0, 0, 0});
  }
  return work;
}

// Calls visit(slice, tile) for each tile of keys that a slice touches.
template <class Visit>
void each_key_tile(const std::vector<WorkSlice>& slices, const Cut& keys, int size, const Visit& visit) {
  for (std::size_t n = 0; n < slices.size(); ++n) {
    const WorkSlice& s = slices[n];
    const Component& component = keys.components[at(keys.component_of[n])];
    const int first = component.first_tile + (s.k_begin - component.begin) / size;
    const int last = component.first_tile + (s.k_end - 1 - component.begin) / size;
    for (int t = first; t <= last; ++t) visit(n, at(t));
  }
}

// WorkSlice::tile_shift of a slice.
int shift_of(const Cut& rows, std::size_t slice, int size) {
  const Component& component = rows.components[at(rows.component_of[slice])];
  return component.first_tile * size - component.begin;
}

}  // namespace

std::vector<int> group_components(std::span<const WorkSlice> slices, const Cut& keys, Index most) {
  std::vector<Range> rows(keys.components.size(), Range{kMaxTokens, 0});
  for (std::size_t n = 0; n < slices.size(); ++n) {
    Range& r = rows[at(keys.component_of[n])];
    r = {min_of(r.begin, slices[n].q_begin), max_of(r.end, slices[n].q_end)};
  }
  std::vector<int> order(rows.size()), group(rows.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    const Range &x = rows[at(a)], &y = rows[at(b)];
    return std::tuple(x.begin, -x.end, a) < std::tuple(y.begin, -y.end, b);
  });
  int of = -1;
  Index end = 0;  // of the rows of the group
  for (const int c : order) {
    const Range& r = rows[at(c)];
    if (r.size() > most) {
      group[at(c)] = c;
      continue;
    }
    if (r.begin >= end) {
      of = c;
      end = r.end;
    }
    group[at(c)] = of;
  }
  return group;
}

BackwardWork::BackwardWork(const KernelBackwardArgs& args, const BackwardShape& shape, int log2_heads,
                           int dq_tiles_per_item, cudaStream_t stream)
    : shape_(shape),
      dq_tiles_per_item_(dq_tiles_per_item),
      can_split_(!args.add_keys && args.steps == nullptr && shape.p_buffers == 0),
      heads_k_(args.k.heads),
      units_of_head_(max_of(1, (args.q.heads >> log2_heads) / args.k.heads)) {
  const int log2_size = shape.log2_rows - log2_heads;
  rows.log2_size = log2_size;
  rows.log2_heads = log2_heads;
  if (args.device_plan != nullptr)
    build_on_device(args, stream);
  else
    cut_slices(args, stream);
}

void BackwardWork::build_on_device(const KernelBackwardArgs& args, cudaStream_t stream) {
  on_device_ = true;
  DeviceBackwardTiles made = build_backward_tiles(
      *args.device_plan, {.log2_size = rows.log2_size, .keys = shape_.keys, .dq_tiles = dq_tiles_per_item_},
      {args.q.heads, args.k.heads, args.attention.head_map}, stream);
  first_ = std::move(made.memory);
  rows.ranges = made.rows;
  rows.tiles = made.most_rows;
  rows.count = made.row_count;
  keys.items = made.keys.items;
  keys.slices = made.keys.slices;
  keys.active = unseen_tiles = made.keys.most;
  keys.count = made.keys.count;
  unseen = made.unseen;
  dq_items = made.dq.items;
  dq_slices = made.dq.slices;
  dq_active = made.dq.most;
  dq_count = made.dq.count;
  heads = made.heads;
}

void BackwardWork::cut_slices(const KernelBackwardArgs& args, cudaStream_t stream) {
  std::vector<Range> q_spans, k_spans;
  for (const Slice& given : joined(args.slices, args.steps != nullptr)) {
    const WorkSlice s = work_slice(given);
    if (s.q_begin >= s.q_end) continue;
    slices_.push_back(s);
    q_spans.push_back({s.q_begin, s.q_end});
    k_spans.push_back({s.k_begin, s.k_end});
  }
  if (args.steps != nullptr) q_spans.insert(q_spans.end(), args.steps->rows.begin(), args.steps->rows.end());
  rows_ = cut_rows(q_spans, static_cast<int>(args.q.rows), rows.size(), true);
  keys_ = cut_rows(k_spans, static_cast<int>(args.k.rows), shape_.keys, true);
  ordered_dq = dq_tiles_per_item_ > 0 && shape_.fits_ordered_dq() && suits_ordered_dq();
  std::vector<int> gaps;
  for (std::size_t t = 0; t < keys_.ranges.size(); t += 2)
    if (keys_.ranges[t + 1] < 0) gaps.insert(gaps.end(), {keys_.ranges[t], ~keys_.ranges[t + 1]});
  HostLists lists({});
  lists.add_heads(args.q.heads, args.k.heads, args.attention.head_map);
  const int zero[] = {0};
  const std::size_t rows_at = lists.add_numbers(rows_.ranges), gaps_at = lists.add_numbers(gaps),
                    zero_at = lists.add_numbers(zero);
  first_ = upload(lists.numbers(), stream);
  rows.ranges = reinterpret_cast<const int2*>(first_.get() + rows_at);
  rows.tiles = rows_.tiles();
  unseen = reinterpret_cast<const int2*>(first_.get() + gaps_at);
  unseen_tiles = static_cast<int>(gaps.size() / 2);
  counter = first_.get() + zero_at;
  heads = lists.heads(first_.get());
}

bool BackwardWork::suits_ordered_dq() const {
  constexpr Index kMost = Index{1} << 24;
  Index visits = 0, all = 0;  // of tiles that the slices' bands reach, and of all tiles of their rows
  each_key_tile(slices_, keys_, shape_.keys, [&](std::size_t n, std::size_t t) {
    WorkSlice s = slices_[n];
    s.tile_shift = shift_of(rows_, n, rows.size());
    const TileRange seen = tiles_seeing(s, keys_.ranges[2 * t], keys_.ranges[2 * t + 1], rows.log2_size);
    visits += seen.last - seen.first + 1;
    all += ((s.q_end - 1 + s.tile_shift) >> rows.log2_size) - ((s.q_begin + s.tile_shift) >> rows.log2_size) + 1;
  });
  // Items of a narrow window visit different rows each, so the sums they add to do not stay in the L2 cache.
  return visits <= kMost && 4 * visits >= all;
}

// A block computes about two steps between its addition and that of the next block.
std::vector<ComponentItems> BackwardWork::components_of(const std::vector<int>& tiles,
                                                        const std::vector<int>& component_of_tile,
                                                        const std::vector<Index>& cost, int sm_count) const {
  constexpr Index kStepsApart = 2;
  std::vector<ComponentItems> components;
  for (std::size_t i = 0; i < tiles.size();) {
    const auto component = [&](std::size_t n) { return component_of_tile[at(tiles[n])]; };
    const std::size_t begin = i;
    Index of_component = 0;
    for (; i < tiles.size() && component(i) == component(begin); ++i)
      of_component += ceil_div(cost[at(tiles[i])], rows.size()) * units_of_head_;
    const Index together = kStepsApart * sm_count * static_cast<Index>(i - begin);
    components.push_back({static_cast<int>(begin), static_cast<int>(i), together / max_of(of_component, 1) + 1});
  }
  return components;
}

void BackwardWork::sort_tiles(std::vector<int>& order, const KeyItems& items) const {
  // The dQ of a group stays in the L2 cache: f32 sums of all heads of a K/V head.
  constexpr Index kCached = Index{32} << 20;
  const Index row_bytes = Index{4} * shape_.dim_qk * units_of_head_ * rows.heads();
  const std::vector<int> group = group_components(slices_, keys_, kCached / row_bytes);
  std::vector<Index> component_cost(group.size(), 0), most(group.size(), 0);  // of a component, and of a group's
  for (const int t : order) component_cost[at(items.component[at(t)])] += items.cost[at(t)];
  for (std::size_t c = 0; c < group.size(); ++c) most[at(group[c])] = max_of(most[at(group[c])], component_cost[c]);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    const std::size_t x = at(a), y = at(b), px = at(items.component[x]), py = at(items.component[y]);
    const std::size_t gx = at(group[px]), gy = at(group[py]);
    if (gx != gy) return most[gx] != most[gy] ? most[gx] > most[gy] : gx < gy;
    if (px != py) return component_cost[px] != component_cost[py] ? component_cost[px] > component_cost[py] : px < py;
    return items.cost[x] > items.cost[y];
  });
}

KeyItems BackwardWork::key_items() const {
  const std::size_t tiles = at(keys_.tiles());
  KeyItems items{
      keys_.ranges, std::vector<int>(tiles, 0), std::vector<Index>(tiles, 0), std::vector<int>(tiles + 1, 0), {}};
  each_key_tile(slices_, keys_, shape_.keys, [&](std::size_t n, std::size_t t) {
    const WorkSlice& s = slices_[n];
    const Index first = max_of(s.k_begin, keys_.ranges[2 * t]), last = min_of(s.k_end, keys_.ranges[2 * t + 1]) - 1;
    ++items.begin[t + 1];
    items.cost[t] += min_of(s.q_end, last - s.lo + 1) - max_of(s.q_begin, first - s.hi);
    items.component[t] = keys_.component_of[n];
  });
  std::partial_sum(items.begin.begin(), items.begin.end(), items.begin.begin());
  items.members.resize(at(items.begin.back()));
  std::vector<int> next(items.begin.begin(), items.begin.end() - 1);
  each_key_tile(slices_, keys_, shape_.keys, [&](std::size_t n, std::size_t t) {
    WorkSlice& s = items.members[at(next[t]++)];
    s = slices_[n];
    s.tile_shift = shift_of(rows_, n, rows.size());
  });
  return items;
}

void BackwardWork::split_long(KeyItems& items, int sm_count) const {
  // A part costs a load of its keys and a store in f32: worth it from so many steps on.
  constexpr Index kLeastSteps = 64;
  const Index time = std::accumulate(items.cost.begin(), items.cost.end(), Index{0}) * heads_k_ / sm_count;
  const Index longest = items.cost.empty() ? 0 : *std::max_element(items.cost.begin(), items.cost.end());
  const Index least = max_of(1, kLeastSteps * rows.size() / units_of_head_);
  // Items that are not much longer than the mean time of an SM are started early enough instead (order_items).
  if (can_split_ && 4 * longest > 5 * max_of(time, least))
    split_long_tiles(items, max_of(time / 2, least), rows.log2_size);
}

void BackwardWork::add_keys(int sm_count, cudaStream_t stream) {
  if (on_device_) return;  // all is there already
  KeyItems tiles = key_items();
  split_long(tiles, sm_count);
  std::vector<int> order;
  for (std::size_t t = 0; t < tiles.tiles(); ++t)
    if (tiles.begin[t] < tiles.begin[t + 1]) order.push_back(static_cast<int>(t));
  sort_tiles(order, tiles);
  std::vector<Index> costs;  // starting and ending a tile costs about one step
  for (const int t : order) costs.push_back(tiles.cost[at(t)] + rows.size());
  std::vector<int> item_order = ordered_dq ? std::vector<int>{} : order_items(costs, heads_k_, sm_count);
  // Three consumers are 2 % faster in the order for ordered dQ.
  if (ordered_dq || (shape_.consumers == 3 && item_order.empty())) {
    std::vector<ComponentItems> components = components_of(order, tiles.component, tiles.cost, sm_count);
    order = spread_components(order, components, heads_k_);
    item_order = order_for_ordered_dq(components, heads_k_);
  }
  std::vector<int> items, split;
  for (const int t : order) {
    const std::size_t x = at(t);
    items.insert(items.end(), {tiles.ranges[2 * x], tiles.ranges[2 * x + 1], tiles.begin[x], tiles.begin[x + 1]});
  }
  for (const SplitTile& t : tiles.split) split.insert(split.end(), {t.begin, t.end, t.first_part, t.parts});
  std::vector<int> dq_order;
  if (ordered_dq) dq_order = number_additions(items, tiles.members, rows.log2_size, rows.tiles);
  DqItems dq;
  if (dq_tiles_per_item_ > 0 && !ordered_dq) dq = cut_dq(slices_, rows_, dq_tiles_per_item_);

  HostLists lists({});
  const std::size_t members_at = lists.add_numbers(numbers_of(tiles.members)), items_at = lists.add_numbers(items),
                    dq_at = lists.add_numbers(dq.items), dq_slices_at = lists.add_numbers(numbers_of(dq.slices)),
                    order_at = lists.add_numbers(item_order), dq_order_at = lists.add_numbers(dq_order),
                    parts_at = lists.add_numbers(tiles.parts), split_at = lists.add_numbers(split);
  second_ = upload(lists.numbers(), stream);
  const int* base = second_.get();
  keys.slices = reinterpret_cast<const WorkSlice*>(base + members_at);
  keys.items = reinterpret_cast<const int4*>(base + items_at);
  keys.active = static_cast<int>(order.size());
  keys.order = item_order.empty() ? nullptr : base + order_at;
  keys.dq_order = base + dq_order_at;
  keys.parts = tiles.parts.empty() ? nullptr : base + parts_at;
  part_count = tiles.part_count();
  split_tiles = reinterpret_cast<const SplitTile*>(base + split_at);
  split_count = static_cast<int>(tiles.split.size());
  dq_items = reinterpret_cast<const DqItem*>(base + dq_at);
  dq_slices = reinterpret_cast<const WorkSlice*>(base + dq_slices_at);
  dq_active = static_cast<int>(dq.items.size() * sizeof(int) / sizeof(DqItem));
  slices_ = {};
  rows_ = keys_ = {};
}

}  // namespace weft::cuda::sm90
