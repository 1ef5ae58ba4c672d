// What the kernels of the backward share: P from scores, softcap, and additions to dQ.
#pragma once

#include "kernel/cuda/rows.cuh"
#include "kernel/cuda/work/tile_iterators.cuh"

namespace weft::cuda {

__device__ inline float probability_of(const ScoreScale& scale, float score, float lse_log2) {
  return exp2_fast(score * scale.scale_log2 - lse_log2);
}

// tanh(softcap_scale·score); multiplies `slope` by its derivative.
__device__ inline float softcapped(float softcap_scale, float score, float& slope) {
  score = tanhf(score * softcap_scale);
  slope *= (1 - score) * (1 + score);
  return score;
}

// Rows of a gradient from a warp's accumulators: `row` and `column` are the lane's first. Those that are not seen(r)
// become zeros, or are left alone if the sums are added to what is there.
template <int kM, int kN8, class Seen>
__device__ inline void store_gradient(const TensorView& to, int row, int head, int column, bool add,
                                      const float (&sums)[kM][kN8][4], const Seen& seen) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = row + 16 * m + 8 * i;
      if (r >= to.rows) continue;
      const bool mine = seen(r);
      if (add && !mine) continue;
      const RowOut out(to, r, head);
#pragma unroll
      for (int n = 0; n < kN8; ++n) {
        const float x = mine ? sums[m][n][2 * i] : 0.0f, y = mine ? sums[m][n][2 * i + 1] : 0.0f;
        if (add)
          out.add(column + n * 8, x, y);
        else
          out.store(column + n * 8, x, y);
      }
    }
}

__device__ inline void red_add_v4_f32(float* to, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};\n" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) atomicAdd(to + i, x[i]);
#endif
}

}  // namespace weft::cuda
