#include "cuda/handle_pool.h"

#include <atomic>
#include <bit>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cuda/runtime.h"

namespace weft::cuda {
namespace {

int current_device() {
  int device = 0;
  WEFT_CUDA(cudaGetDevice(&device));
  return device;
}

// Unused handles by device or size. Never destroyed, because CUDA may be gone before the last owner is.
template <class Key, class T>
class FreeList {
 public:
  // Empty: the caller creates one. Room for its return is reserved here, so that destructors need no memory.
  std::optional<T> take(Key key) {
    const std::lock_guard lock(mutex_);
    Entry& entry = all_[key];
    if (entry.free.empty()) {
      entry.free.reserve(entry.created + 1);
      ++entry.created;
      return {};
    }
    const T handle = entry.free.back();
    entry.free.pop_back();
    return handle;
  }
  void put(Key key, T handle) noexcept {
    const std::lock_guard lock(mutex_);
    all_.find(key)->second.free.push_back(handle);
  }

 private:
  struct Entry {
    std::vector<T> free = {};
    std::size_t created = 0;  // or attempted
  };
  std::mutex mutex_;
  std::map<Key, Entry> all_;
};

template <class Key, class T>
FreeList<Key, T>& free_list() {
  static auto& free = *new FreeList<Key, T>;
  return free;
}
FreeList<std::pair<int, bool>, cudaStream_t>& streams() { return free_list<std::pair<int, bool>, cudaStream_t>(); }
FreeList<int, cudaEvent_t>& events() { return free_list<int, cudaEvent_t>(); }
FreeList<std::size_t, char*>& pinned() { return free_list<std::size_t, char*>(); }

// Without this only the pool's own device can access its memory.
void share_with_peers(cudaMemPool_t pool, int device) {
  int devices = 0;
  WEFT_CUDA(cudaGetDeviceCount(&devices));
  for (int peer = 0; peer < devices; ++peer) {
    int can = 0;
    if (peer != device) WEFT_CUDA(cudaDeviceCanAccessPeer(&can, peer, device));
    const cudaMemAccessDesc access{{cudaMemLocationTypeDevice, peer}, cudaMemAccessFlagsProtReadWrite};
    if (can != 0) WEFT_CUDA(cudaMemPoolSetAccess(pool, &access, 1));
  }
}

void set_up(cudaMemPool_t pool, int device) {
  // Never release memory to the system, because the next step allocates it again.
  constexpr std::uint64_t kAll = ~std::uint64_t{0};
  std::uint64_t free = kAll;
  WEFT_CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &free));
  // Streams must not wait for each other because of memory.
  int no = 0;
  WEFT_CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolReuseAllowInternalDependencies, &no));
  share_with_peers(pool, device);
}

cudaMemPool_t make_pool(int device) {
  cudaMemPoolProps props = {};
  props.allocType = cudaMemAllocationTypePinned;
  props.location = {cudaMemLocationTypeDevice, device};
  cudaMemPool_t pool = nullptr;
  WEFT_CUDA(cudaMemPoolCreate(&pool, &props));
  try {
    set_up(pool, device);
  } catch (...) {
    clear_last_error(cudaMemPoolDestroy(pool));
    throw;
  }
  return pool;
}

// For calls that are not allowed in a capture, but need not be captured either.
class OutsideCapture {
 public:
  OutsideCapture() { WEFT_CUDA(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~OutsideCapture() { clear_last_error(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  OutsideCapture(const OutsideCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

std::atomic<bool> unpooled = false;

// A framework's memory, and what is taken of it.
struct TakenForGraphs {
  std::atomic<bool> used = false;
  std::mutex mutex;
  GraphMemory memory = {};
  std::unordered_set<void*> taken = {};
};
TakenForGraphs& for_graphs() {
  static auto& only = *new TakenForGraphs;  // never destroyed, as the pools
  return only;
}

void* take_for_graph(std::size_t bytes, cudaStream_t stream) {
  TakenForGraphs& graphs = for_graphs();
  void* data = graphs.memory.take(bytes, current_device(), stream);  // without the lock: it may wait for other threads
  const std::lock_guard lock(graphs.mutex);
  graphs.taken.insert(data);
  return data;
}

bool give_back_of_graph(void* data) {
  TakenForGraphs& graphs = for_graphs();
  if (!graphs.used) return false;
  {
    const std::lock_guard lock(graphs.mutex);
    if (graphs.taken.erase(data) == 0) return false;
  }
  graphs.memory.give_back(data);
  return true;
}

}  // namespace

cudaMemPool_t memory_pool() {
  static std::mutex mutex;
  static auto& pools = *new std::map<int, cudaMemPool_t>;
  const int device = current_device();
  const std::lock_guard lock(mutex);
  cudaMemPool_t& pool = pools[device];
  if (pool == nullptr) {
    const OutsideCapture now;
    pool = make_pool(device);
  }
  return pool;
}

PooledStream::PooledStream(bool first) : device_(current_device()), first_(first) {
  if (const auto free = streams().take({device_, first})) {
    stream_ = *free;
    return;
  }
  int last = 0, most = 0;
  WEFT_CUDA(cudaDeviceGetStreamPriorityRange(&last, &most));
  WEFT_CUDA(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, first ? most : last));
}
PooledStream::~PooledStream() { streams().put({device_, first_}, stream_); }

PooledEvent::PooledEvent() : device_(current_device()) {
  if (const auto free = events().take(device_))
    event_ = *free;
  else
    WEFT_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
}
PooledEvent::~PooledEvent() { events().put(device_, event_); }

PooledPinned::PooledPinned(std::size_t bytes) : room_(std::bit_ceil(bytes)) {
  if (const auto free = pinned().take(room_))
    data_ = *free;
  else
    WEFT_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&data_), room_, cudaHostAllocPortable));
}
PooledPinned::~PooledPinned() { pinned().put(room_, data_); }

void use_graph_memory(GraphMemory memory) {
  TakenForGraphs& graphs = for_graphs();
  const std::lock_guard lock(graphs.mutex);
  if (graphs.used) return;  // memory that is in use was taken from the first
  graphs.memory = std::move(memory);
  graphs.used = true;
}

void* allocate_async(std::size_t bytes, cudaStream_t stream) {
  if (for_graphs().used && is_captured(stream)) return take_for_graph(bytes, stream);
  void* data = nullptr;
  if (!unpooled || is_captured(stream))  // a graph can only use the pool
    WEFT_CUDA(cudaMallocFromPoolAsync(&data, bytes, memory_pool(), stream));
  else
    WEFT_CUDA(cudaMalloc(&data, bytes));
  return data;
}
void free_async(void* data, cudaStream_t stream) {
  if (give_back_of_graph(data)) return;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (unpooled) clear_last_error(cudaStreamIsCapturing(stream, &capture));
  const bool in_order = !unpooled || capture != cudaStreamCaptureStatusNone;
  clear_last_error(in_order ? cudaFreeAsync(data, stream) : cudaFree(data));
}
void use_unpooled_memory() { unpooled = true; }

}  // namespace weft::cuda
