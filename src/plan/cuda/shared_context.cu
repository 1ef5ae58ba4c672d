#include <list>
#include <map>
#include <mutex>
#include <vector>

#include "cuda/runtime.h"
#include "plan/cuda/context.h"
#include "plan/shared_context.h"
#include "text.h"

namespace weft {
namespace {

// Contexts of one GPU, most recently used last.
struct SharedContexts {
  struct Entry {
    void* stream;
    DeviceContext context;
  };
  std::list<Entry> used;
  std::vector<DeviceContext> spare;
};

// Streams of frameworks come from pools of a few dozen. Programs that make streams without end use contexts again.
constexpr std::size_t kMostStreams = 128;
// Graphs that are captured before the next call outside of a capture, each on a stream of its own.
constexpr std::size_t kSpare = 2;

// Never destroyed: at the end of the process the driver may be gone.
std::mutex& shared_lock() {
  static auto* const lock = new std::mutex;
  return *lock;
}
SharedContexts& shared_of(int device) {
  static auto* const all = new std::map<int, SharedContexts>;
  return (*all)[device];
}

// Calls that share a context are not each other's: what one of them found is for whoever asks, not for the next.
DeviceContext new_context(const Place& place) {
  DeviceContext context(place);
  context.data().faults_wait = true;
  return context;
}

DeviceContext fresh_context(SharedContexts& shared, const Place& place) {
  if (shared.used.size() < kMostStreams) return new_context(place);
  WEFT_CUDA(cudaDeviceSynchronize());  // the stream it was used on may be gone, and its work must be done
  DeviceContext context = std::move(shared.used.front().context);
  shared.used.pop_front();
  context.data().place = place;
  return context;
}

DeviceContext spare_context(SharedContexts& shared, const Place& place) {
  if (shared.spare.empty())
    throw Error(text("the first use of cu_seqlens in the memory of GPU ", place.device,
                     " is inside the capture of a CUDA graph, where nothing can be allocated"),
                "make one such call outside of the capture first, as graphs are warmed up");
  DeviceContext context = std::move(shared.spare.back());
  shared.spare.pop_back();
  context.data().place = place;
  return context;
}

DeviceContext& shared_context(const Place& place) {
  SharedContexts& shared = shared_of(place.device);
  const bool captured = cuda::is_captured(static_cast<cudaStream_t>(place.stream));
  bool made = false;
  while (!captured && shared.spare.size() < kSpare) {
    shared.spare.push_back(new_context(place));
    made = true;
  }
  // A spare context is used in any stream, so what clears it must be done.
  if (made) WEFT_CUDA(cudaStreamSynchronize(static_cast<cudaStream_t>(place.stream)));
  for (auto i = shared.used.begin(); i != shared.used.end(); ++i) {
    if (i->stream != place.stream) continue;
    shared.used.splice(shared.used.end(), shared.used, i);
    return i->context;
  }
  shared.used.push_back({place.stream, captured ? spare_context(shared, place) : fresh_context(shared, place)});
  return shared.used.back().context;
}

}  // namespace

void with_shared_context(const Place& place, const std::function<void(DeviceContext&)>& work) {
  const std::lock_guard lock(shared_lock());
  const cuda::DeviceGuard on(place.device);
  work(shared_context(place));
}

void check_shared_contexts(int device) {
  const std::lock_guard lock(shared_lock());
  const cuda::DeviceGuard on(device);
  for (SharedContexts::Entry& e : shared_of(device).used) e.context.check();
}

}  // namespace weft
