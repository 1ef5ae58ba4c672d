// Memory, streams and events of CUDA that are used again: pools of what is slow to create and destroy (handles that
// are given back go to the next owner on the same device, and work that the previous owner left in a stream runs
// first), and arrays in stream-ordered memory.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>

#include <cuda_runtime_api.h>

#include "cuda/runtime.h"

namespace weft::cuda {

// Does not synchronize with the default stream. `first`: has the highest priority.
class PooledStream {
 public:
  explicit PooledStream(bool first = false);
  ~PooledStream();
  PooledStream(const PooledStream&) = delete;
  PooledStream& operator=(const PooledStream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  int device_ = 0;
  bool first_ = false;
  cudaStream_t stream_ = nullptr;
};

// An event without timing.
class PooledEvent {
 public:
  PooledEvent();
  ~PooledEvent();
  PooledEvent(const PooledEvent&) = delete;
  PooledEvent& operator=(const PooledEvent&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  int device_ = 0;
  cudaEvent_t event_ = nullptr;
};

// Page-locked host memory. Give it back only when no work in flight touches it.
class PooledPinned {
 public:
  explicit PooledPinned(std::size_t bytes);
  ~PooledPinned();
  PooledPinned(const PooledPinned&) = delete;
  PooledPinned& operator=(const PooledPinned&) = delete;
  char* get() const { return data_; }

 private:
  std::size_t room_ = 0;  // a power of two
  char* data_ = nullptr;
};

// Stream-ordered memory of the current device, from a pool of Weft's own. Freed memory stays in the pool until the
// process ends: mapping it again takes longer than many kernels (0.2 to 1 ms per 100 MB on an H200).
void* allocate_async(std::size_t bytes, cudaStream_t stream);
void free_async(void* data, cudaStream_t stream);  // errors are ignored
cudaMemPool_t memory_pool();                       // of the current device, for tests and tools that measure its use
// From now on memory that is taken while a graph is captured comes from a framework's allocator, which keeps what its
// graphs use apart from all else. Otherwise it becomes nodes of the graph, which transports cannot register. Both
// functions may be called by any thread; what was taken is given back the same way, in a capture or not.
struct GraphMemory {
  std::function<void*(std::size_t bytes, int device, cudaStream_t stream)> take;
  std::function<void(void* data)> give_back;
};
void use_graph_memory(GraphMemory memory);
// For memory checkers: from now on each array is allocated and freed by itself, synchronously.
void use_unpooled_memory();

template <class T>
class StreamArray {
 public:
  StreamArray() = default;
  StreamArray(std::size_t size, cudaStream_t stream) : size_(size), stream_(stream) {
    if (size > 0) data_ = static_cast<T*>(allocate_async(size * sizeof(T), stream));
  }
  ~StreamArray() {
    if (data_ != nullptr) free_async(data_, stream_);
  }
  StreamArray(StreamArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)), stream_(other.stream_) {}
  StreamArray& operator=(StreamArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(stream_, other.stream_);
    return *this;
  }

  T* get() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
  cudaStream_t stream_ = nullptr;
};

}  // namespace weft::cuda
