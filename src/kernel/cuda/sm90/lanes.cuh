// What lanes do with their own numbers of a warpgroup's products.
#pragma once

#include <type_traits>

#include "kernel/cuda/rows.cuh"

namespace weft::cuda::sm90 {

// tanh, and what is left of 1 beside its square. Small ones by their series: a large softcap multiplies them.
__device__ inline float bent_score(float x, float& slope) {
  const float y = x * x;
  const float far = 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(x * (2 * kLog2E)));
  const float bent = y < 0.01f ? x * fmaf(y, fmaf(y, 2.0f / 15, -1.0f / 3), 1.0f) : far;
  slope = (1.0f - bent) * (1.0f + bent);
  return bent;
}

// Registers are written before this, and read after it, not where the compiler would like it better.
template <class T, int kSize>
__device__ __forceinline__ void settle(T (&x)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i)
    if constexpr (std::is_same_v<T, float>)
      asm volatile("" : "+f"(x[i])::"memory");
    else
      asm volatile("" : "+r"(x[i])::"memory");
}

// A 4 x 4 transpose within four lanes: lane c gets the c-th word of each.
__device__ inline void exchange(unsigned (&w)[4]) {
  const int lane = static_cast<int>(threadIdx.x);
  const auto swap = [&](unsigned& a, unsigned& b, int bit) {
    const bool upper = (lane & bit) != 0;
    const unsigned got = __shfl_xor_sync(0xffffffffu, upper ? a : b, bit);
    (upper ? a : b) = got;
  };
  swap(w[0], w[1], 1);
  swap(w[2], w[3], 1);
  swap(w[0], w[2], 2);
  swap(w[1], w[3], 2);
}

__device__ __forceinline__ bool leads_warp() { return threadIdx.x % 32 == 0; }
template <class N>
__device__ __forceinline__ unsigned packed_pair(float x, float y) {
  unsigned one[1];
  N::pack(one, x, y);
  return one[0];
}

}  // namespace weft::cuda::sm90
