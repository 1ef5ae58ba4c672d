// What the forward does to rows, whoever holds them: the sign of Q, masks, and how rows begin and end. A lane has
// columns 2·(lane % 4) and the next of each 8 (tile.cuh).
#pragma once

#include "kernel/cuda/portable/params.h"
#include "kernel/cuda/rows.cuh"
#include "kernel/cuda/work/tile_iterators.cuh"

namespace weft::cuda {

// For a scale that is not positive the queries change sign, or become zeros (NaN stays NaN). The tile was just asked
// for.
template <class N, int kThreads>
__device__ inline void apply_sign(unsigned tile, unsigned bytes, float sign) {
  cp_async_wait_all();
  __syncthreads();
  for (unsigned i = threadIdx.x; i < bytes / 2; i += kThreads) {
    std::uint16_t bits;
    asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(bits) : "r"(tile + 2 * i));
    bits = N::times(bits, sign);
    asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(tile + 2 * i), "h"(bits) : "memory");
  }
}

template <int kM, int kN8>
__device__ inline void apply_softcap(float (&scores)[kM][kN8][4], float softcap_scale) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[m][n][i] = tanhf(scores[m][n][i] * softcap_scale);
}

// `row` is the lane's first, `base` the first key.
template <int kM, int kN8>
__device__ inline void apply_mask(float (&scores)[kM][kN8][4], const WorkSlice& slice, int row, int base) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const VisibleRange seen = visible_keys(slice, row + 16 * m + 8 * i, base);
      const int column = 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
      for (int n = 0; n < kN8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int key = n * 8 + column + j;
          if (key < seen.first || key > seen.last) scores[m][n][2 * i + j] = kMinusInfinity<float>;
        }
    }
}

// What a row's P is computed against. A row without keys so far: any finite number will do, while -inf - -inf is NaN.
__device__ inline float reference_of(float most) { return most == kMinusInfinity<float> ? 0.0f : most; }
// Not fused: the exponent is exactly 0 at the maximum, so that P is exactly 1 there.
__device__ inline float probability_against(float reference, float score, float scale_log2) {
  return exp2_fast(__fsub_rn(__fmul_rn(score, scale_log2), reference));
}
template <int kN8>
__device__ inline float row_maximum(const float (&scores)[kN8][4], int i) {
  float most = max_nan(scores[0][2 * i], scores[0][2 * i + 1]);
#pragma unroll
  for (int n = 1; n < kN8; ++n) most = max_nan(most, max_nan(scores[n][2 * i], scores[n][2 * i + 1]));
  most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, 1));
  return max_nan(most, __shfl_xor_sync(0xffffffffu, most, 2));
}
// Over the four lanes of a row.
__device__ inline float row_total(float sum) {
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}
template <int kM, int kN8>
__device__ inline void rescale_rows(float (&sums)[kM][kN8][4], const float (&by)[kM][2]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] *= by[m][i / 2];
}

__device__ inline RowState<float>& state_of(const ForwardParams& params, int row, int head) {
  return params.partial.states[static_cast<Index>(row) * params.heads_q + head];
}
// Does the row go on where an earlier call left it?
__device__ inline bool resumes(const ForwardParams& params, int tile, int row, int head) {
  return row < params.q.view.rows && row_is_live(params.list, tile, row) && !is_empty(state_of(params, row, head));
}

// Row i (0, 1) of a block of accumulators from the sums that an earlier call left, columns `first` and on.
template <int kN8>
__device__ inline void resume_sums(const TensorView& old, int row, int head, int first, int i, float (&sums)[kN8][4]) {
  const int column = first + 2 * static_cast<int>(threadIdx.x % 4);
  const float* from = static_cast<const float*>(old.data) + offset_of(old, row, head);
#pragma unroll
  for (int n = 0; n < kN8; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j)
      if (n * 8 + column + j < old.dim) sums[n][2 * i + j] = from[n * 8 + column + j];
}

// Writes columns `first` and on of row i (0, 1) of a block of accumulators, and, where there is one of a row, its state
// or lse, if `owner`.
template <int kN8>
__device__ inline void end_row(const ForwardParams& params, int tile, int row, int head, const RowState<float>& state,
                               bool owner, int first, int i, const float (&sums)[kN8][4]) {
  const bool partial = params.partial.states != nullptr;
  if (partial && !row_is_live(params.list, tile, row)) return;
  float weight = 1;
  if (partial) {
    if (owner) state_of(params, row, head) = state;
  } else {
    const FinishedRow<float> done = finish(state, sink_logit(params.sink, head));
    weight = done.weight;
    if (owner && params.lse.given())
      store_element(params.lse.data, params.lse.dtype, offset_of(params.lse, row, head), done.lse);
  }
  const bool empty = is_empty(state);
  const RowOut out(partial ? params.partial.sums : params.out, row, head);
  const int column = first + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int n = 0; n < kN8; ++n) {
    // Adding 0 turns -0 into 0.
    const float x = empty ? 0.0f : sums[n][2 * i] * weight + 0.0f;
    const float y = empty ? 0.0f : sums[n][2 * i + 1] * weight + 0.0f;
    out.store(n * 8 + column, x, y);
  }
}

// max_logit of a head, at least the most of the warp's lanes.
__device__ inline void raise_max_logit(const ForwardParams& params, int head, float most) {
  if (params.max_logit == nullptr) return;
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, lane));
  if (threadIdx.x % 32 == 0 && most != kMinusInfinity<float>) atomicMax(params.max_logit + head, ordered(most));
}

}  // namespace weft::cuda
