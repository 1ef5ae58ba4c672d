// An array in stream-ordered device memory: no synchronization, and allowed while a graph is captured.
#pragma once

#include <cstddef>
#include <utility>

#include <cuda_runtime_api.h>

#include "cuda/handle_pool.h"
#include "cuda/runtime.h"

namespace weft::cuda {

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
