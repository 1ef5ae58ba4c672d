// Streams, events and pinned memory, which take long to make and end: given back, they are kept for whoever asks next
// on the same device. Work that the last owner left in a stream only comes first.
#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

namespace weft::cuda {

// Does not wait for the default stream, nor that for it. `first`: where two kernels are ready, this stream's begins
// first.
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

// Marks a point of a stream; has no time.
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

// Memory of the host that GPUs read and write. Give it back when nothing under way touches it.
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

// Memory of the current device, taken and given back in the order of a stream, from a pool of Weft's own. What was
// given back stays there until the process ends: to map memory anew takes longer than many a kernel (0.2 to 1 ms a
// piece of 100 MB on an H200).
void* allocate_async(std::size_t bytes, cudaStream_t stream);
void free_async(void* data, cudaStream_t stream);  // nobody is told if that goes wrong
cudaMemPool_t memory_pool();  // the current device's: for tests and tools that ask how much of it was in use
// For memory checkers, from now on: each piece is allocated and freed by itself, and the GPU is waited for.
void use_unpooled_memory();

}  // namespace weft::cuda
