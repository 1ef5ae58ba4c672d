#include "cuda/kept.h"

#include <atomic>
#include <bit>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "cuda/capture.h"
#include "cuda/check.h"
#include "cuda/forget.h"

namespace weft::cuda {
namespace {

int current_device() {
  int device = 0;
  WEFT_CUDA(cudaGetDevice(&device));
  return device;
}

// What lies about, by device or size. Never ended: CUDA may be gone before the last owner is.
template <class Key, class T>
class Shelf {
 public:
  // None: the caller makes one. There is room for it when it comes back, so that destructors need no memory.
  std::optional<T> take(Key key) {
    const std::lock_guard lock(mutex_);
    Some& some = all_[key];
    if (some.kept.empty()) {
      some.kept.reserve(some.made + 1);
      ++some.made;
      return {};
    }
    const T thing = some.kept.back();
    some.kept.pop_back();
    return thing;
  }
  void put(Key key, T thing) noexcept {
    const std::lock_guard lock(mutex_);
    all_.find(key)->second.kept.push_back(thing);
  }

 private:
  struct Some {
    std::vector<T> kept = {};
    std::size_t made = 0;  // or tried to
  };
  std::mutex mutex_;
  std::map<Key, Some> all_;
};

template <class Key, class T>
Shelf<Key, T>& shelf() {
  static auto& kept = *new Shelf<Key, T>;
  return kept;
}
Shelf<std::pair<int, bool>, cudaStream_t>& streams() { return shelf<std::pair<int, bool>, cudaStream_t>(); }
Shelf<int, cudaEvent_t>& events() { return shelf<int, cudaEvent_t>(); }
Shelf<std::size_t, char*>& pinned() { return shelf<std::size_t, char*>(); }

// Memory of a pool is seen by its own device alone, unless it says otherwise.
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
  // All of it: what a step has taken the next one takes again.
  constexpr std::uint64_t kKept = ~std::uint64_t{0};
  std::uint64_t kept = kKept;
  WEFT_CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept));
  // Streams must not come to wait for each other because of memory.
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
    forget(cudaMemPoolDestroy(pool));
    throw;
  }
  return pool;
}

// What a captured call may not do, but need not be captured either.
class OutsideCapture {
 public:
  OutsideCapture() { WEFT_CUDA(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~OutsideCapture() { forget(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  OutsideCapture(const OutsideCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

std::atomic<bool> plain_memory = false;

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

Stream::Stream(bool first) : device_(current_device()), first_(first) {
  if (const auto kept = streams().take({device_, first})) {
    stream_ = *kept;
    return;
  }
  int last = 0, most = 0;
  WEFT_CUDA(cudaDeviceGetStreamPriorityRange(&last, &most));
  WEFT_CUDA(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, first ? most : last));
}
Stream::~Stream() { streams().put({device_, first_}, stream_); }

Event::Event() : device_(current_device()) {
  if (const auto kept = events().take(device_))
    event_ = *kept;
  else
    WEFT_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
}
Event::~Event() { events().put(device_, event_); }

PinnedMemory::PinnedMemory(std::size_t bytes) : room_(std::bit_ceil(bytes)) {
  if (const auto kept = pinned().take(room_))
    data_ = *kept;
  else
    WEFT_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&data_), room_, cudaHostAllocPortable));
}
PinnedMemory::~PinnedMemory() { pinned().put(room_, data_); }

void* take_memory(std::size_t bytes, cudaStream_t stream) {
  void* data = nullptr;
  if (!plain_memory || is_captured(stream))  // a graph has no other memory
    WEFT_CUDA(cudaMallocFromPoolAsync(&data, bytes, memory_pool(), stream));
  else
    WEFT_CUDA(cudaMalloc(&data, bytes));
  return data;
}
void give_memory(void* data, cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (plain_memory) forget(cudaStreamIsCapturing(stream, &capture));
  const bool in_order = !plain_memory || capture != cudaStreamCaptureStatusNone;
  forget(in_order ? cudaFreeAsync(data, stream) : cudaFree(data));
}
void use_plain_memory() { plain_memory = true; }

}  // namespace weft::cuda
