// P and dS in the accumulators' lane layout: of S^T and dP^T [64 keys][rows] a lane has two keys, 8 apart, and two of
// each eight rows (times heads).
#pragma once

#include "kernel/cuda/portable/probabilities.cuh"
#include "kernel/cuda/sm90/backward/producer.cuh"
#include "kernel/cuda/sm90/fragments.cuh"

namespace weft::cuda::sm90 {

// The lane's first of a warpgroup's 64 keys.
__device__ __forceinline__ int first_key_of_lane() {
  return static_cast<int>(threadIdx.x % 128) / 32 * 16 + static_cast<int>(threadIdx.x % 32) / 4;
}

__device__ __forceinline__ float4 load_pairs(unsigned at) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];\n" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at));
  return x;
}
// Statistics of the lane's rows, loaded while WGMMA runs because shared memory has high latency here: kFours as
// registers allow, the others where they are used.
template <int kFours>
struct PrefetchedStatistics {
  unsigned at;
  float4 fours[kFours > 0 ? kFours : 1];
  __device__ __forceinline__ explicit PrefetchedStatistics(unsigned from)
      : at(from + static_cast<unsigned>(threadIdx.x % 4) * 16) {
#pragma unroll
    for (int n = 0; n < kFours; ++n) fours[n] = load_pairs(at + static_cast<unsigned>(n * 64));
  }
  // Statistics of rows 16n to 16n + 15.
  __device__ __forceinline__ float4 lse_of(int n) const {
    return n < kFours ? fours[n] : load_pairs(at + static_cast<unsigned>(n * 64));
  }
  __device__ __forceinline__ float4 delta_of(int n) const { return lse_of(n); }
};

// The same for kCount float4 of LSE and then kCount of delta: each is loaded kFours before it is used.
template <int kFours, int kCount>
struct PipelinedStatistics {
  unsigned lse, delta;
  float4 fours[kFours];
  __device__ __forceinline__ PipelinedStatistics(unsigned lse_at, unsigned delta_at)
      : lse(lse_at + static_cast<unsigned>(threadIdx.x % 4) * 16),
        delta(delta_at + static_cast<unsigned>(threadIdx.x % 4) * 16) {
#pragma unroll
    for (int n = 0; n < kFours; ++n) fours[n] = load(n);
  }
  __device__ __forceinline__ float4 load(int n) const {
    return load_pairs(n < kCount ? lse + static_cast<unsigned>(n * 64)
                                 : delta + static_cast<unsigned>((n - kCount) * 64));
  }
  __device__ __forceinline__ float4 claim(int n) {
    const float4 x = fours[n % kFours];
    if (n + kFours < 2 * kCount) fours[n % kFours] = load(n + kFours);
    return x;
  }
  __device__ __forceinline__ float4 lse_of(int n) { return claim(n); }
  __device__ __forceinline__ float4 delta_of(int n) { return claim(kCount + n); }
};

// Where a lane's elements lie in their step: flags, address of the step, first key and first row.
struct StepPlace {
  int flags;
  unsigned step;
  int first_key, first_row;
};

// Rows that see a lane's two keys: those r with unsigned(r - first) < count.
struct VisibleRows {
  int first[2];
  unsigned count[2];
  __device__ __forceinline__ bool sees(int i, int row) const {
    return static_cast<unsigned>(row - first[i]) < count[i];
  }
};
__device__ __forceinline__ VisibleRows visible_rows(const BackwardParams& params, const StepPlace& place) {
  const QueryStep step = read_query_step(place.step);
  VisibleRows rows;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const VisibleRange seen = visible_rows(step, place.first_key + 8 * i);
    rows.first[i] = (seen.first << params.rows.log2_heads) - 2 * static_cast<int>(threadIdx.x % 4) - place.first_row;
    rows.count[i] = static_cast<unsigned>(max(0, seen.last - seen.first + 1)) << params.rows.log2_heads;
  }
  return rows;
}

// Rounds pairs of elements.
template <class N, int kSize>
__device__ __forceinline__ void round_pairs(unsigned (&to)[kSize / 2], const float (&from)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) to[i] = packed_pair<N>(from[2 * i], from[2 * i + 1]);
}

// Scores become P.
template <int kSize, class Lse>
__device__ __forceinline__ void probabilities(const BackwardParams& params, float (&s)[kSize], Lse& lse,
                                              const StepPlace& place) {
  const float scale_log2 = params.scores.scale_log2;
#pragma unroll
  for (int n = 0; n < kSize / 8; ++n) {
    const float4 four = lse.lse_of(n);
    const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) s[8 * n + i] = exp2_fast(fmaf(s[8 * n + i], scale_log2, -x[i / 4 * 2 + i % 2]));
  }
  if ((place.flags & QueryStep::kMasked) != 0) {
    const VisibleRows rows = visible_rows(params, place);
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      if (!rows.sees(i / 2 % 2, 8 * (i / 4) + i % 2)) s[i] = 0;
  }
}
// The same, and p gets P rounded.
template <class N, int kSize, class Lse>
__device__ __forceinline__ void probabilities(const BackwardParams& params, float (&s)[kSize], unsigned (&p)[kSize / 2],
                                              Lse& lse, const StepPlace& place) {
  probabilities(params, s, lse, place);
  round_pairs<N>(p, s);
}
// With softcap: p gets P rounded, and s the factors of dP - delta.
template <class N, int kSize, class Lse>
__device__ __forceinline__ void softcap_probabilities(const BackwardParams& params, float (&s)[kSize],
                                                      unsigned (&p)[kSize / 2], Lse& lse, const StepPlace& place) {
  VisibleRows rows{{-8, -8}, {~0u, ~0u}};
  if ((place.flags & QueryStep::kMasked) != 0) rows = visible_rows(params, place);
#pragma unroll
  for (int n = 0; n < kSize / 8; ++n) {
    const float4 four = lse.lse_of(n);
    const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float pair[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& score = s[8 * n + 2 * i + j];
        float slope;
        const float capped = softcap_tanh(score * params.scores.softcap_scale, slope);
        pair[j] = exp2_fast(fmaf(capped, params.scores.scale_log2, -x[i / 2 * 2 + j]));
        if (!rows.sees(i % 2, 16 * n + i / 2 * 8 + j)) pair[j] = slope = 0;
        score = pair[j] * slope;
      }
      p[4 * n + i] = packed_pair<N>(pair[0], pair[1]);
    }
  }
}

// dS = P·(dP - delta). The scale is applied before rounding, to use the range of f16.
template <class N, int kSize, class Delta>
__device__ __forceinline__ void score_gradients(const BackwardParams& params, unsigned (&ds)[kSize / 2],
                                                const float (&p)[kSize], const float (&dp)[kSize], Delta& delta) {
  const float scale = params.scale;
#pragma unroll
  for (int n = 0; n < kSize / 8; ++n) {
    const float4 four = delta.delta_of(n);
    const float x[4] = {four.x, four.y, four.z, four.w};
    const auto number = [&](int i) { return p[8 * n + i] * fmaf(dp[8 * n + i], scale, -x[i / 4 * 2 + i % 2]); };
#pragma unroll
    for (int i = 0; i < 4; ++i) ds[4 * n + i] = packed_pair<N>(number(2 * i), number(2 * i + 1));
  }
}

// Stores rounded elements of kRows rows, from first_row on, into a tile [key][row] of kKeys keys, at the warpgroup's 64
// keys from first_key on.
template <int kRows, int kKeys>
__device__ __forceinline__ void store_fragments(const unsigned (&of)[kRows / 4], unsigned tile, int first_key,
                                                int first_row) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int key = first_key + static_cast<int>(threadIdx.x % 128) / 32 * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < kRows / 16; ++i) {
    const int piece = first_row / 8 + 2 * (i % 4) + lane / 16;
    const unsigned to = tile + static_cast<unsigned>(i / 4 * kKeys * 128 + key * 128 + ((piece ^ (key & 7)) << 4));
    const unsigned four[4] = {of[4 * i], of[4 * i + 1], of[4 * i + 2], of[4 * i + 3]};
    stmatrix_x4(to, four);
  }
}

}  // namespace weft::cuda::sm90
