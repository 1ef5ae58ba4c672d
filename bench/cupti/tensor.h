// Random tensors on a GPU, for timings.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include <cuda_runtime_api.h>

#include "cuda/runtime.h"
#include "index.h"
#include "weft/tensor.h"

namespace weft::bench {

// Numbers in [-1, 1) from a hash of their place.
inline std::vector<float> noise(std::size_t count, std::uint32_t seed) {
  std::vector<float> result(count);
  std::uint32_t x = seed * 2654435761u + 1;
  for (float& value : result) {
    x = x * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<std::int32_t>(x)) * 0x1p-31f;
  }
  return result;
}

class Tensor {
 public:
  Tensor(DType dtype, Index rows, Index heads, Index dim, std::uint32_t seed = 0) {
    const std::size_t count = at(rows * heads * dim);
    const std::size_t bytes = count * at(size_of(dtype));
    void* data = nullptr;
    WEFT_CUDA(cudaMalloc(&data, bytes));
    view_ = thd(data, dtype, rows, heads, dim);
    if (seed == 0) {
      WEFT_CUDA(cudaMemset(data, 0xff, bytes));
      return;
    }
    const std::vector<float> values = noise(count, seed);
    if (dtype == DType::f32) {
      WEFT_CUDA(cudaMemcpy(data, values.data(), bytes, cudaMemcpyHostToDevice));
      return;
    }
    std::vector<std::uint16_t> halves(count);  // bf16, cut off
    for (std::size_t i = 0; i < count; ++i) {
      std::uint32_t bits;
      std::memcpy(&bits, &values[i], 4);
      halves[i] = static_cast<std::uint16_t>(bits >> 16);
    }
    WEFT_CUDA(cudaMemcpy(data, halves.data(), bytes, cudaMemcpyHostToDevice));
  }
  ~Tensor() { cudaFree(view_.data); }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  const TensorView& view() const { return view_; }

 private:
  TensorView view_;
};

}  // namespace weft::bench
