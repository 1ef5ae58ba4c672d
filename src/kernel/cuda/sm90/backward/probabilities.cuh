// P and dS of the backward, by lanes: a lane of a warpgroup has two keys, 8 apart, of S^T and dP^T [64 keys][rows], and
// of each eight rows (times heads) two.
#pragma once

#include "kernel/cuda/portable/scores.cuh"
#include "kernel/cuda/sm90/backward/producer.cuh"
#include "kernel/cuda/sm90/fragments.cuh"

namespace weft::cuda::sm90 {

// Of a warpgroup's 64 keys the lane's first.
__device__ __forceinline__ int first_key_of_lane() {
  return static_cast<int>(threadIdx.x % 128) / 32 * 16 + static_cast<int>(threadIdx.x % 32) / 4;
}

__device__ __forceinline__ float4 load_pairs(unsigned at) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];\n" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at));
  return x;
}
// Statistics of the lane's rows, asked for while products run: in shared memory they are half a step away. kFours as
// registers allow; the others where they are used.
template <int kFours>
struct StatisticsAhead {
  unsigned at;
  float4 fours[kFours > 0 ? kFours : 1];
  __device__ __forceinline__ explicit StatisticsAhead(unsigned from)
      : at(from + static_cast<unsigned>(threadIdx.x % 4) * 16) {
#pragma unroll
    for (int n = 0; n < kFours; ++n) fours[n] = load_pairs(at + static_cast<unsigned>(n * 64));
  }
  // Of rows 16n and the 15 behind.
  __device__ __forceinline__ float4 lse_of(int n) const {
    return n < kFours ? fours[n] : load_pairs(at + static_cast<unsigned>(n * 64));
  }
  __device__ __forceinline__ float4 delta_of(int n) const { return lse_of(n); }
};

// The same of both kinds, kCount fours of lse and then as many of delta: each is asked for kFours before it is taken.
template <int kFours, int kCount>
struct StatisticsInTurn {
  unsigned lse, delta;
  float4 fours[kFours];
  __device__ __forceinline__ StatisticsInTurn(unsigned lse_at, unsigned delta_at)
      : lse(lse_at + static_cast<unsigned>(threadIdx.x % 4) * 16),
        delta(delta_at + static_cast<unsigned>(threadIdx.x % 4) * 16) {
#pragma unroll
    for (int n = 0; n < kFours; ++n) fours[n] = load(n);
  }
  __device__ __forceinline__ float4 load(int n) const {
    return load_pairs(n < kCount ? lse + static_cast<unsigned>(n * 64)
                                 : delta + static_cast<unsigned>((n - kCount) * 64));
  }
  __device__ __forceinline__ float4 take(int n) {
    const float4 x = fours[n % kFours];
    if (n + kFours < 2 * kCount) fours[n % kFours] = load(n + kFours);
    return x;
  }
  __device__ __forceinline__ float4 lse_of(int n) { return take(n); }
  __device__ __forceinline__ float4 delta_of(int n) { return take(kCount + n); }
};

// Where a lane's numbers lie in their step: its flags, its place in shared memory, the first key and the first row.
struct StepPlace {
  int flags;
  unsigned step;
  int first_key, first_row;
};

// Rows of a lane's two keys that see them: those r with unsigned(r - first) < count.
struct RowsOfKeys {
  int first[2];
  unsigned count[2];
  __device__ __forceinline__ bool sees(int i, int row) const {
    return static_cast<unsigned>(row - first[i]) < count[i];
  }
};
__device__ __forceinline__ RowsOfKeys rows_of_keys(const BackwardCall& call, const StepPlace& place) {
  const RowStep step = read_row_step(place.step);
  RowsOfKeys rows;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Seen seen = rows_of_key(step, place.first_key + 8 * i);
    rows.first[i] = (seen.first << call.rows.log_heads) - 2 * static_cast<int>(threadIdx.x % 4) - place.first_row;
    rows.count[i] = static_cast<unsigned>(max(0, seen.last - seen.first + 1)) << call.rows.log_heads;
  }
  return rows;
}

// Rounded, in pairs.
template <class N, int kSize>
__device__ __forceinline__ void round_pairs(unsigned (&to)[kSize / 2], const float (&from)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) to[i] = packed_pair<N>(from[2 * i], from[2 * i + 1]);
}

// Scores become shares.
template <int kSize, class Lse>
__device__ __forceinline__ void plain_shares(const BackwardCall& call, float (&s)[kSize], Lse& lse,
                                             const StepPlace& place) {
  const float factor = call.scores.factor;
#pragma unroll
  for (int n = 0; n < kSize / 8; ++n) {
    const float4 four = lse.lse_of(n);
    const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) s[8 * n + i] = exp2_fast(fmaf(s[8 * n + i], factor, -x[i / 4 * 2 + i % 2]));
  }
  if ((place.flags & RowStep::kMasked) != 0) {
    const RowsOfKeys rows = rows_of_keys(call, place);
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      if (!rows.sees(i / 2 % 2, 8 * (i / 4) + i % 2)) s[i] = 0;
  }
}
// The same, and p has them rounded.
template <class N, int kSize, class Lse>
__device__ __forceinline__ void plain_shares(const BackwardCall& call, float (&s)[kSize], unsigned (&p)[kSize / 2],
                                             Lse& lse, const StepPlace& place) {
  plain_shares(call, s, lse, place);
  round_pairs<N>(p, s);
}
// With softcap: p has the shares, and s what dS is multiplied by.
template <class N, int kSize, class Lse>
__device__ __forceinline__ void bent_shares(const BackwardCall& call, float (&s)[kSize], unsigned (&p)[kSize / 2],
                                            Lse& lse, const StepPlace& place) {
  RowsOfKeys rows{{-8, -8}, {~0u, ~0u}};
  if ((place.flags & RowStep::kMasked) != 0) rows = rows_of_keys(call, place);
#pragma unroll
  for (int n = 0; n < kSize / 8; ++n) {
    const float4 four = lse.lse_of(n);
    const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float share[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& score = s[8 * n + 2 * i + j];
        float slope;
        const float bent = bent_score(score * call.scores.bend, slope);
        share[j] = exp2_fast(fmaf(bent, call.scores.factor, -x[i / 2 * 2 + j]));
        if (!rows.sees(i % 2, 16 * n + i / 2 * 8 + j)) share[j] = slope = 0;
        score = share[j] * slope;
      }
      p[4 * n + i] = packed_pair<N>(share[0], share[1]);
    }
  }
}

// dS = P·(dP - delta), with the scale before it is rounded, so that f16 holds what it can.
template <class N, int kSize, class Delta>
__device__ __forceinline__ void score_gradients(const BackwardCall& call, unsigned (&ds)[kSize / 2],
                                                const float (&p)[kSize], const float (&dp)[kSize], Delta& delta) {
  const float scale = call.scale;
#pragma unroll
  for (int n = 0; n < kSize / 8; ++n) {
    const float4 four = delta.delta_of(n);
    const float x[4] = {four.x, four.y, four.z, four.w};
    const auto number = [&](int i) { return p[8 * n + i] * fmaf(dp[8 * n + i], scale, -x[i / 4 * 2 + i % 2]); };
#pragma unroll
    for (int i = 0; i < 4; ++i) ds[4 * n + i] = packed_pair<N>(number(2 * i), number(2 * i + 1));
  }
}

// Rounded numbers of kRows rows, from first_row on, to a tile [key][row] of kKeys keys, the warpgroup's 64 from
// first_key on.
template <int kRows, int kKeys>
__device__ __forceinline__ void keep_rows(const unsigned (&of)[kRows / 4], unsigned tile, int first_key,
                                          int first_row) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int key = first_key + static_cast<int>(threadIdx.x % 128) / 32 * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < kRows / 16; ++i) {
    const int piece = first_row / 8 + 2 * (i % 4) + lane / 16;
    const unsigned to = tile + static_cast<unsigned>(i / 4 * kKeys * 128 + key * 128 + ((piece ^ (key & 7)) << 4));
    const unsigned four[4] = {of[4 * i], of[4 * i + 1], of[4 * i + 2], of[4 * i + 3]};
    store_matrices(to, four);
  }
}

}  // namespace weft::cuda::sm90
