// Operations on a lane's fragment of WGMMA accumulators (layout in wgmma.cuh).
#pragma once

#include <type_traits>

#include "kernel/cuda/rows.cuh"

namespace weft::cuda::sm90 {

// tanh(x), and its slope 1 - tanh(x)^2. Small x go by the series, because a large softcap multiplies the result.
__device__ inline float softcap_tanh(float x, float& slope) {
  const float y = x * x;
  const float far = 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(x * (2 * kLog2E)));
  const float tanh_x = y < 0.01f ? x * fmaf(y, fmaf(y, 2.0f / 15, -1.0f / 3), 1.0f) : far;
  slope = (1.0f - tanh_x) * (1.0f + tanh_x);
  return tanh_x;
}

// Keeps the compiler from moving accesses of registers that WGMMA reads or writes across this point.
template <class T, int kSize>
__device__ __forceinline__ void warpgroup_fence_operand(T (&x)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i)
    if constexpr (std::is_same_v<T, float>)
      asm volatile("" : "+f"(x[i])::"memory");
    else
      asm volatile("" : "+r"(x[i])::"memory");
}

// A 4 x 4 transpose between four lanes: lane c gets word c of each.
__device__ inline void transpose_4x4(unsigned (&w)[4]) {
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

// A value that is the same in all lanes, in a form that the compiler knows to be uniform, so that it computes with it
// in the uniform datapath.
__device__ __forceinline__ unsigned warp_uniform(unsigned x) { return __reduce_or_sync(0xffffffffu, x); }

template <class N>
__device__ __forceinline__ unsigned packed_pair(float x, float y) {
  unsigned one[1];
  N::pack(one, x, y);
  return one[0];
}

// Stores a row of 16-bit elements, of which a lane has two columns of each eight, value(n, 0) and value(n, 1): after a
// transpose each of four lanes stores eight columns at once. All lanes take part, also where the row is not valid.
template <class N, int kColumns, class Value>
__device__ __forceinline__ void store_row_vec8(std::uint16_t* row, bool inside, int first_column, Index columns,
                                               const Value& value) {
#pragma unroll
  for (int n = 0; n < kColumns / 8; n += 4) {
    unsigned w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = packed_pair<N>(value(n + j, 0), value(n + j, 1));
    transpose_4x4(w);
    const int column = first_column + 8 * (n + static_cast<int>(threadIdx.x % 4));
    if (inside && column < columns) *reinterpret_cast<uint4*>(row + column) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

// A lane's part of a row of f32: two columns of each eight.
struct FragmentRowF32 {
  float* data;
  int columns;  // from the lane's first column on
  bool pairs;   // two floats can be accessed as one float2
  __device__ FragmentRowF32(const TensorView& view, int row, int head) {
    const int first = 2 * static_cast<int>(threadIdx.x % 4);
    data = static_cast<float*>(view.data) + offset_of(view, row, head) + first;
    columns = static_cast<int>(view.dim) - first;
    pairs = reinterpret_cast<std::uintptr_t>(data) % 8 == 0 && view.dim % 2 == 0;
  }
  __device__ float2 load(int n) const {
    if (pairs) return 8 * n < columns ? *reinterpret_cast<const float2*>(data + 8 * n) : float2{0, 0};
    return {8 * n < columns ? data[8 * n] : 0.0f, 8 * n + 1 < columns ? data[8 * n + 1] : 0.0f};
  }
  __device__ void store(int n, float x, float y) const {
    if (pairs) {
      if (8 * n < columns) *reinterpret_cast<float2*>(data + 8 * n) = {x, y};
      return;
    }
    if (8 * n < columns) data[8 * n] = x;
    if (8 * n + 1 < columns) data[8 * n + 1] = y;
  }
};

}  // namespace weft::cuda::sm90
