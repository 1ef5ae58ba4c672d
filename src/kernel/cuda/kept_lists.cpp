#include "kernel/cuda/kept_lists.h"

#include <algorithm>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/capture.h"
#include "cuda/check.h"

namespace weft::cuda {
namespace {

constexpr std::size_t kMostLists = 64, kMostBytes = std::size_t{16} << 20, kMostStreams = 64;

struct Entry {
  ListKey key;
  std::shared_ptr<void> lists;
  std::size_t bytes;
};
// Of one stream, the last used first.
struct Shelf {
  std::list<Entry> entries;
  std::size_t bytes = 0;
};
// By device and the stream's number, which no later stream has. Never ended: CUDA may be gone before. Memory of a stream
// that is gone could not be given back in its order, so its shelf stays, and there are not endlessly many.
struct Shelves {
  std::mutex mutex;
  std::map<std::pair<int, unsigned long long>, Shelf> all;
};
Shelves& shelves() {
  static auto& kept = *new Shelves;
  return kept;
}
std::pair<int, unsigned long long> number_of(cudaStream_t stream) {
  std::pair<int, unsigned long long> number{};
  WEFT_CUDA(cudaGetDevice(&number.first));
  WEFT_CUDA(cudaStreamGetId(stream, &number.second));
  return number;
}

}  // namespace

ListKey::ListKey(std::span<const Slice> slices, std::span<const Index> head_map, std::vector<Index> sizes)
    : hash_(0),
      sizes_(std::move(sizes)),
      head_map_(head_map.begin(), head_map.end()),
      slices_(slices.begin(), slices.end()) {
  const auto add = [&](Index x) { hash_ = (hash_ ^ static_cast<std::uint64_t>(x)) * 0x9e3779b97f4a7c15u; };
  for (const Index x : sizes_) add(x);
  for (const Slice& s : slices_) {
    add(s.q_begin);
    add(s.q_end);
    add(s.k_begin);
    add(s.k_end);
  }
}

std::shared_ptr<void> find_lists(const ListKey& key, cudaStream_t stream) {
  if (is_captured(stream)) return nullptr;
  const auto number = number_of(stream);
  const std::lock_guard lock(shelves().mutex);
  const auto shelf = shelves().all.find(number);
  if (shelf == shelves().all.end()) return nullptr;
  std::list<Entry>& entries = shelf->second.entries;
  const auto entry = std::find_if(entries.begin(), entries.end(), [&](const Entry& e) { return e.key == key; });
  if (entry == entries.end()) return nullptr;
  entries.splice(entries.begin(), entries, entry);
  return entry->lists;
}

void keep_lists(ListKey key, std::shared_ptr<void> lists, std::size_t bytes, cudaStream_t stream) {
  const auto number = number_of(stream);
  std::list<Entry> dropped;  // ended when nobody is locked out
  const std::lock_guard lock(shelves().mutex);
  if (bytes > kMostBytes || (!shelves().all.contains(number) && shelves().all.size() >= kMostStreams)) return;
  Shelf& shelf = shelves().all[number];
  shelf.entries.push_front({std::move(key), std::move(lists), bytes});
  shelf.bytes += bytes;
  while (shelf.entries.size() > kMostLists || shelf.bytes > kMostBytes) {
    shelf.bytes -= shelf.entries.back().bytes;
    dropped.splice(dropped.begin(), shelf.entries, std::prev(shelf.entries.end()));
  }
}

}  // namespace weft::cuda
