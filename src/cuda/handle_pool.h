// Pools of streams, events and pinned memory, which are slow to create and destroy: handles that are given back go to
// the next owner on the same device. Work that the previous owner left in a stream runs first.
#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

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
// For memory checkers: from now on each array is allocated and freed by itself, synchronously.
void use_unpooled_memory();

}  // namespace weft::cuda
