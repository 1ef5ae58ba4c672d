#include "kernel/cuda/work/list.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <numeric>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda/runtime.h"
#include "index.h"
#include "text.h"
#include "weft/error.h"

namespace weft::cuda {
namespace {

Range rows_of(const Slice& s, Side side) {
  return side == Side::query ? Range{s.q_begin, s.q_end} : Range{s.k_begin, s.k_end};
}

Slice cut(Slice s, Side side, Index first, Index end) {
  Index& begin = side == Side::query ? s.q_begin : s.k_begin;
  Index& last = side == Side::query ? s.q_end : s.k_end;
  begin = max_of(begin, first);
  last = min_of(last, end);
  return s;
}

// Joins b to a if one slice shows exactly the pairs of both.
bool join(Slice& a, const Slice& b) {
  if (a.q_begin != b.q_begin || a.q_end != b.q_end || a.k_end != b.k_begin) return false;
  // The joined slice has a's lower bound and b's upper bound: each must mask the other's keys as their own bound does,
  // or mask none of them.
  const Index first_of_b = b.k_begin - (b.q_end - 1), last_of_a = a.k_end - 1 - a.q_begin;
  if (a.lo != b.lo && max_of(a.lo, b.lo) > first_of_b) return false;
  if (a.hi != b.hi && min_of(a.hi, b.hi) < last_of_a) return false;
  a.k_end = b.k_end;
  a.hi = b.hi;
  return true;
}

constexpr std::size_t kMostLists = 64, kMostBytes = std::size_t{16} << 20, kMostStreams = 64;

// Compares bytes, since the members leave no padding.
template <class T>
bool same(std::span<const T> a, const std::vector<T>& b) {
  static_assert(std::has_unique_object_representations_v<T>);
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

struct Entry {
  Entry(const ListKey& key, std::shared_ptr<void> lists_of, std::size_t bytes_of)
      : slices(key.slices.begin(), key.slices.end()),
        head_map(key.head_map.begin(), key.head_map.end()),
        sizes(key.sizes.begin(), key.sizes.end()),
        lists(std::move(lists_of)),
        bytes(bytes_of) {}
  bool matches(const ListKey& key) const {
    return same(key.sizes, sizes) && same(key.head_map, head_map) && same(key.slices, slices);
  }

  std::vector<Slice> slices;
  std::vector<Index> head_map, sizes;
  std::shared_ptr<void> lists;
  std::size_t bytes;
};
// The cached lists of one stream, most recently used first.
struct StreamLists {
  std::list<Entry> entries;
  std::size_t bytes = 0;
};
// By device and stream id, which CUDA never reuses. Never destroyed, because CUDA may be gone before. Memory of a
// destroyed stream cannot be freed in its order, so its lists stay; kMostStreams bounds how many.
struct ListCache {
  std::mutex mutex;
  std::map<std::pair<int, unsigned long long>, StreamLists> all;
};
ListCache& cache() {
  static auto& lists = *new ListCache;
  return lists;
}
std::pair<int, unsigned long long> number_of(cudaStream_t stream) {
  std::pair<int, unsigned long long> number{};
  WEFT_CUDA(cudaGetDevice(&number.first));
  WEFT_CUDA(cudaStreamGetId(stream, &number.second));
  return number;
}

}  // namespace

std::vector<Slice> joined(std::span<const Slice> slices, bool in_steps) {
  std::vector<Slice> made;
  for (const Slice& s : slices)
    if (!in_steps || made.empty() || !join(made.back(), s)) made.push_back(s);
  return made;
}

HostLists::HostLists(std::span<const Slice> slices) {
  for (const Slice& s : slices) {
    const Slice t = trimmed(s, true);
    if (t.q_begin >= t.q_end) continue;
    useful_.push_back(t);
    slices_.push_back(work_slice(s));
  }
}

std::size_t HostLists::append(std::span<const int> more) {
  numbers_.resize((numbers_.size() + 3) / 4 * 4);  // aligned for WorkSlice
  const std::size_t begin = numbers_.size();
  numbers_.insert(numbers_.end(), more.begin(), more.end());
  return begin;
}

int HostLists::add_tiles(Side side, Index rows, int size) {
  std::vector<Range> tiles;
  for (Index row = 0; row < rows; row += size) tiles.push_back({row, row + size});
  return add_tiles(side, tiles);
}

int HostLists::add_tiles(Side side, std::span<const Range> ranges_of_rows) {
  const std::size_t tiles = ranges_of_rows.size();
  std::vector<int> begin(tiles + 1, 0);
  std::vector<Index> cost(tiles, 0);
  const auto each = [&](auto&& visit) {
    for (std::size_t n = 0; n < useful_.size(); ++n) {
      const Range r = rows_of(useful_[n], side);
      const auto first = std::partition_point(ranges_of_rows.begin(), ranges_of_rows.end(),
                                              [&](const Range& tile) { return tile.end <= r.begin; });
      for (auto t = first; t != ranges_of_rows.end() && t->begin < r.end; ++t)
        visit(n, static_cast<std::size_t>(t - ranges_of_rows.begin()));
    }
  };
  // A tile with few rows iterates as far as a full one, so its cost is what it meets on the other side.
  each([&](std::size_t n, std::size_t t) {
    ++begin[t + 1];
    const Slice met = trimmed(cut(useful_[n], side, ranges_of_rows[t].begin, ranges_of_rows[t].end), true);
    if (met.q_begin < met.q_end) cost[t] += rows_of(met, side == Side::query ? Side::key : Side::query).size();
  });
  const Index entries = std::accumulate(begin.begin(), begin.end(), Index{0});
  if (entries > kMaxTokens / static_cast<Index>(kSliceInts))
    throw Error(text(useful_.size(), " slices over ", tiles, " tiles make ", entries, " entries of tiles, more than ",
                     kMaxTokens / static_cast<Index>(kSliceInts)),
                "give fewer rows at a time; in a tree, let the child with the most rows below it be the first");
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  std::vector<int> members(at(begin.back()) * kSliceInts), next(begin.begin(), begin.end() - 1);
  each([&](std::size_t n, std::size_t t) {
    std::memcpy(members.data() + at(next[t]++) * kSliceInts, &slices_[n], sizeof(WorkSlice));
  });
  // Tiles that start at the same row of the other side, those of a document or a tree, follow each other, so that what
  // they read is in the L2 cache. Documents are ordered by their most expensive tile, so that the work left for the end
  // is short, and so are their tiles, to an eighth of the most expensive: branches of a tree that cost about the same
  // stay neighbours, because they share most of their keys.
  std::vector<Index> from(tiles, -1);
  std::unordered_map<Index, Index> most;
  each([&](std::size_t n, std::size_t t) {
    if (from[t] < 0) from[t] = rows_of(useful_[n], side == Side::query ? Side::key : Side::query).begin;
  });
  for (std::size_t t = 0; t < tiles; ++t) most[from[t]] = max_of(most[from[t]], cost[t]);
  std::vector<int> order(tiles);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    const std::size_t x = at(a), y = at(b);
    if (from[x] == from[y]) {
      const Index highest = most.at(from[x]), eighth = max_of(1, highest / 8);
      const Index less_x = (highest - cost[x]) / eighth, less_y = (highest - cost[y]) / eighth;
      // The rows of a causal document that see most are its last, the keys that are seen most its first.
      return less_x != less_y ? less_x < less_y : side == Side::query && a > b;
    }
    const Index of_x = most.at(from[x]), of_y = most.at(from[y]);
    return of_x != of_y ? of_x > of_y : from[x] < from[y];
  });
  const int count[] = {static_cast<int>(tiles)};
  std::vector<int> ranges;
  for (std::size_t t = 0; t < tiles; ++t) ranges.insert(ranges.end(), {begin[t], begin[t + 1]});
  lists_.push_back({append(members), append(ranges), append(order), append(count)});
  return count[0];
}

std::vector<Range> HostLists::cut_query_tiles(Index rows, int size, std::span<const Range> held) const {
  std::vector<Range> spans(held.begin(), held.end());
  for (const Slice& s : useful_) spans.push_back({s.q_begin, s.q_end});
  std::sort(spans.begin(), spans.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  std::vector<Range> tiles;
  bool whole = false;  // the last tile ends where slices end, and may be extended if the next rows fit
  const auto add = [&](Index begin, Index end) {
    if (begin == end) return;
    if (whole && end - tiles.back().begin <= size) {
      tiles.back().end = end;
      return;
    }
    whole = end - begin <= size;
    // The tile that is not full comes first: with causal masks it sees the least.
    for (Index last = end - (end - begin - 1) / size * size; begin < end; begin = last, last += size)
      tiles.push_back({begin, last});
  };
  Index begin = 0, end = 0;  // rows that slices connect
  for (const Range& s : spans) {
    if (s.begin >= end) {
      add(begin, end);
      add(end, s.begin);  // rows that see nothing
      begin = s.begin;
    }
    end = max_of(end, s.end);
  }
  add(begin, end);
  add(end, rows);
  return tiles;
}

void HostLists::add_heads(Index heads_q, Index heads_k, std::span<const Index> head_map) {
  std::vector<int> kv(at(heads_q)), begin(at(heads_k) + 1, 0);
  for (std::size_t h = 0; h < kv.size(); ++h) {
    kv[h] = static_cast<int>(head_map.empty() ? static_cast<Index>(h) / (heads_q / heads_k) : head_map[h]);
    ++begin[at(kv[h]) + 1];
  }
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  std::vector<int> heads(kv.size()), next(begin.begin(), begin.end() - 1);
  for (std::size_t h = 0; h < kv.size(); ++h) heads[at(next[at(kv[h])]++)] = static_cast<int>(h);
  kv_head_ = append(kv);
  head_begin_ = append(begin);
  heads_ = append(heads);
}

WorkList HostLists::list(const int* base, std::size_t n) const {
  const Places& place = lists_[n];
  return {reinterpret_cast<const WorkSlice*>(base + place.slices), reinterpret_cast<const int2*>(base + place.ranges),
          base + place.order, base + place.tiles};
}

WorkHeads HostLists::heads(const int* base) const { return {base + kv_head_, base + head_begin_, base + heads_}; }

StreamArray<int> upload(std::span<const int> numbers, cudaStream_t stream) {
  if (is_captured(stream))
    throw Error("slices on the host while a CUDA graph is captured",
                "call outside the capture, or give a device_plan, whose slices the graph reads anew");
  StreamArray<int> to(numbers.size(), stream);
  // Pageable memory is read before the call returns.
  WEFT_CUDA(cudaMemcpyAsync(to.get(), numbers.data(), numbers.size_bytes(), cudaMemcpyHostToDevice, stream));
  return to;
}

WorkLists make_work_lists(std::span<const Slice> slices, DevicePlan* plan, std::span<const Tiling> tilings,
                          const HeadGroups& heads, cudaStream_t stream) {
  if (plan != nullptr) return build_lists(*plan, tilings, heads, stream);
  HostLists lists(slices);
  for (const Tiling& t : tilings) lists.add_tiles(t.side, t.rows, t.size);
  lists.add_heads(heads.heads_q, heads.heads_k, heads.map);
  WorkLists made{upload(lists.numbers(), stream), {}, {}};
  for (std::size_t n = 0; n < tilings.size(); ++n) made.lists.push_back(lists.list(made.memory.get(), n));
  made.heads = lists.heads(made.memory.get());
  return made;
}

std::shared_ptr<void> find_cached_lists(const ListKey& key, cudaStream_t stream) {
  if (is_captured(stream)) return nullptr;
  const auto number = number_of(stream);
  const std::lock_guard lock(cache().mutex);
  const auto lists_of_stream = cache().all.find(number);
  if (lists_of_stream == cache().all.end()) return nullptr;
  std::list<Entry>& entries = lists_of_stream->second.entries;
  const auto entry = std::find_if(entries.begin(), entries.end(), [&](const Entry& e) { return e.matches(key); });
  if (entry == entries.end()) return nullptr;
  entries.splice(entries.begin(), entries, entry);
  return entry->lists;
}

void cache_lists(const ListKey& key, std::shared_ptr<void> lists, std::size_t bytes, cudaStream_t stream) {
  const auto number = number_of(stream);
  std::list<Entry> dropped;  // destroyed after the mutex is released
  const std::lock_guard lock(cache().mutex);
  if (bytes > kMostBytes || (!cache().all.contains(number) && cache().all.size() >= kMostStreams)) return;
  StreamLists& lists_of_stream = cache().all[number];
  lists_of_stream.entries.emplace_front(key, std::move(lists), bytes);
  lists_of_stream.bytes += bytes;
  while (lists_of_stream.entries.size() > kMostLists || lists_of_stream.bytes > kMostBytes) {
    lists_of_stream.bytes -= lists_of_stream.entries.back().bytes;
    dropped.splice(dropped.begin(), lists_of_stream.entries, std::prev(lists_of_stream.entries.end()));
  }
}

}  // namespace weft::cuda
