#include <algorithm>
#include <cstring>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/runtime.h"
#include "kernel/cuda/work/list.h"

namespace weft::cuda {
namespace {

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
