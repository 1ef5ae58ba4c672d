// Q·K^T by one warp with mma.sync, on tiles in WGMMA's swizzled layout: for the rare step whose scores only some warps
// need again.
#pragma once

#include "kernel/cuda/portable/tile.cuh"

namespace weft::cuda::sm90 {

// 16 rows of Q at `q`, which is a multiple of eight rows past its tile's start, and all keys of the tile at `k`. Boxes
// of 64 columns are q_box and k_box bytes apart. The result has the layout of WGMMA accumulators.
template <class N, int kColumns, int kCount>
__device__ inline void scores_by_warp(float (&s)[kCount], unsigned q, unsigned q_box, unsigned k, unsigned k_box) {
  const int lane = static_cast<int>(threadIdx.x % 32), row = lane % 8, matrix = lane / 8;
  float sums[kCount / 4][4];
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i / 4][i % 4] = 0;
#pragma unroll 1
  for (int c = 0; c < kColumns / 16; ++c) {
    const unsigned box = static_cast<unsigned>(c / 4);
    unsigned a[1][4];
    ldmatrix_x4(a[0], q + box * q_box + swizzled_offset<64>(matrix % 2 * 8 + row, c % 4 * 2 + matrix / 2));
#pragma unroll
    for (int n = 0; n < kCount / 8; ++n) {
      unsigned b[4];
      ldmatrix_x4(b, k + box * k_box + swizzled_offset<64>(16 * n + matrix / 2 * 8 + row, c % 4 * 2 + matrix % 2));
      const unsigned low[1][2] = {{b[0], b[1]}}, high[1][2] = {{b[2], b[3]}};
      N::mma(sums[2 * n], a, low);
      N::mma(sums[2 * n + 1], a, high);
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = sums[i / 4][i % 4];
}

}  // namespace weft::cuda::sm90
