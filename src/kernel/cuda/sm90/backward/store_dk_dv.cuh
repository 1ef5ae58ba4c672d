// Stores an item's dK and dV from the registers of a consumer.
#pragma once

#include "kernel/cuda/sm90/backward/producer.cuh"
#include "kernel/cuda/sm90/fragments.cuh"

namespace weft::cuda::sm90 {

// One bit for each of a lane's two keys, `first` in the tile and 8 further: set if a slice shows it to a query head.
__device__ __forceinline__ int live_keys(const BackwardParams& params, const SharedItem& item, int first) {
  int live = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int key = item.begin + first + 8 * i;
    bool seen = key < item.end && (item.flags & SharedItem::kUsed) != 0;
    if (seen && (item.flags & SharedItem::kZeroFill) != 0) {
      seen = false;
      for (int m = item.first; m < item.last && !seen; ++m) {
        const WorkSlice& s = params.keys.slices[m];
        seen = key >= s.k_begin && key < s.k_end;
      }
    }
    live |= seen ? 1 << i : 0;
  }
  return live;
}

// Stores columns from first_column on.
template <class N, int kSize>
__device__ __forceinline__ void store_keys(const BackwardParams& params, const TensorView& to, bool vec8,
                                           const float (&sums)[kSize], const SharedItem& item, int first, int live,
                                           int first_column = 0) {
  constexpr int kColumns = 2 * kSize;
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int key = item.begin + first + 8 * i;
    const bool inside = key < item.end, seen = (live >> i & 1) != 0;
    const auto value = [&](int n, int j) { return seen ? sums[4 * n + 2 * i + j] : 0.0f; };
    if (!vec8) {
      if (!inside || (params.add_keys && !seen)) continue;
      const int column = first_column + 2 * (lane % 4), columns = static_cast<int>(to.dim) - column;
      float* at = static_cast<float*>(to.data) + offset_of(to, key, item.kv_head) + column;
      const bool pairs = reinterpret_cast<std::uintptr_t>(at) % 8 == 0 && to.dim % 2 == 0;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const float2 x = {value(n, 0), value(n, 1)};
        if (pairs && 8 * n < columns) {
          if (params.add_keys)
            red_add_v2_f32(at + 8 * n, x.x, x.y);
          else
            *reinterpret_cast<float2*>(at + 8 * n) = x;
        } else {
          if (8 * n < columns) at[8 * n] = params.add_keys ? at[8 * n] + x.x : x.x;
          if (8 * n + 1 < columns) at[8 * n + 1] = params.add_keys ? at[8 * n + 1] + x.y : x.y;
        }
      }
      continue;
    }
    std::uint16_t* at = static_cast<std::uint16_t*>(to.data) + (inside ? offset_of(to, key, item.kv_head) : 0);
    store_row_vec8<N, kColumns>(at, inside, first_column, to.dim, value);
  }
}

// Stores 64 keys of one of several items that share a tile: in register layout, for the kernel that adds up the parts.
template <int kSize>
__device__ __forceinline__ void store_part(float* to, const float (&sums)[kSize], int live) {
  float4* at = reinterpret_cast<float4*>(to) + threadIdx.x % 128;
#pragma unroll
  for (int n = 0; n < kSize / 4; ++n)
    at[n * 128] = {(live & 1) != 0 ? sums[4 * n] : 0.0f, (live & 1) != 0 ? sums[4 * n + 1] : 0.0f,
                   (live & 2) != 0 ? sums[4 * n + 2] : 0.0f, (live & 2) != 0 ? sums[4 * n + 3] : 0.0f};
}

}  // namespace weft::cuda::sm90
