// The two products that attention is made of, over any SIMD type.
//
// A SIMD type S has: V (a vector of kLanes floats), Quad (four neighbouring floats, one of which fma_lane<L> spreads
// over all lanes), load, store, all, zero, add, sub, mul, fma(a, b, c) = a·b + c, max, fma_lane<L>(sum, x, quad), and
// what elementwise.h asks for. kPanel rows are in a panel; scores are computed kKeys rows by kPanel columns at a time,
// sums of dK and dV at most kKeys rows, product_by_columns 4 rows of kPvVectors vectors; kBlocked: see ColumnBlocks in
// rows.h. Targets define it in a file of their own; everything here is a template over it, so that code of different
// instruction sets can never be mixed up by the linker.
//
// kPair == 1: all numbers are f32. kPair == 2: a and b, p and v below are units of two bf16 (rows.h), n counts units
// and fma_lane is a dot product of pairs. That S has join(even, odd): a unit per lane, rounded; store_rounded(to, x):
// a bf16 per lane; zip(even, odd, to, n): n units of the bf16 of two rows; and its transpose4 has no factor.
#pragma once

#include "weft/config.h"

#define WEFT_INLINE inline __attribute__((always_inline))
// The products keep all registers to themselves: inlined into a larger function g++ spills some of their sums.
#define WEFT_APART __attribute__((noinline))
#define WEFT_UNROLL _Pragma("GCC unroll 16")

namespace weft::cpu {

// Rows in a panel, if S does not say otherwise: the lanes of scores, one column of S^T.
inline constexpr Index kPanel = 16;

// Sums that the next call will load, while this one computes.
template <class S, int kRows, int kVectors>
WEFT_INLINE void prefetch_sums(const float* c, Index c_stride) {
  WEFT_UNROLL for (int r = 0; r < kRows; ++r) WEFT_UNROLL for (int x = 0; x < kVectors; ++x)
      __builtin_prefetch(c + r * c_stride + x * S::kLanes);
}

// c[j][0..width) (+)= sum over i < n of a[j][i]·b[i][0..width), for kKeys rows j; width = kVectors vectors; n is a
// multiple of 4. One accumulator per element, summed in the order of i: how rows are grouped into calls changes no bit.
template <class S, int kKeys, int kVectors, bool kAdd>
WEFT_APART void product_by_rows(const float* a, Index a_stride, Index n, const float* b, Index b_stride, float* c,
                                Index c_stride) {
  using V = typename S::V;
  V sum[kKeys][kVectors];
  WEFT_UNROLL for (int j = 0; j < kKeys; ++j) {
    WEFT_UNROLL for (int v = 0; v < kVectors; ++v) {
      sum[j][v] = kAdd ? S::load(c + j * c_stride + v * S::kLanes) : S::zero();
    }
  }
  if constexpr (S::kBlocked && kAdd) prefetch_sums<S, kKeys, kVectors>(c + kVectors * S::kLanes, c_stride);
#pragma GCC unroll 1
  for (Index i = 0; i < n; i += 4) {
    typename S::Quad quad[kKeys];
    WEFT_UNROLL for (int j = 0; j < kKeys; ++j) quad[j] = S::load_quad(a + j * a_stride + i);
    const auto step = [&]<int kLane>() __attribute__((always_inline)) {
      V x[kVectors];
      WEFT_UNROLL for (int v = 0; v < kVectors; ++v) x[v] = S::load(b + (i + kLane) * b_stride + v * S::kLanes);
      if constexpr (S::kBlocked) {  // one spread element at a time: all of them would not fit the registers
        WEFT_UNROLL for (int j = 0; j < kKeys; ++j) WEFT_UNROLL for (int v = 0; v < kVectors; ++v) sum[j][v] =
            S::template fma_lane<kLane>(sum[j][v], x[v], quad[j]);
      } else {
        WEFT_UNROLL for (int v = 0; v < kVectors; ++v) WEFT_UNROLL for (int j = 0; j < kKeys; ++j) sum[j][v] =
            S::template fma_lane<kLane>(sum[j][v], x[v], quad[j]);
      }
    };
    step.template operator()<0>();
    step.template operator()<1>();
    step.template operator()<2>();
    step.template operator()<3>();
  }
  WEFT_UNROLL for (int j = 0; j < kKeys; ++j) {
    WEFT_UNROLL for (int v = 0; v < kVectors; ++v) S::store(c + j * c_stride + v * S::kLanes, sum[j][v]);
  }
}

// c[r][0..width) = c[r][..]·factor[r] + sum over j < n of p[j][r]·v[j][..], for 4 rows r; width = kVectors vectors.
template <class S, int kVectors, bool kScale>
WEFT_APART void product_by_columns(const float* p, Index p_stride, Index n, const float* v, Index v_stride, float* c,
                                   Index c_stride, const float* factor) {
  using V = typename S::V;
  constexpr int kRows = 4;
  V sum[kRows][kVectors];
  WEFT_UNROLL for (int r = 0; r < kRows; ++r) {
    WEFT_UNROLL for (int x = 0; x < kVectors; ++x) {
      const V old = S::load(c + r * c_stride + x * S::kLanes);
      sum[r][x] = kScale ? S::mul(old, S::all(factor[r])) : old;
    }
  }
  if constexpr (S::kBlocked) prefetch_sums<S, kRows, kVectors>(c + kRows * c_stride, c_stride);
  const auto step = [&](Index j) __attribute__((always_inline)) {
    const typename S::Quad quad = S::load_quad(p + j * p_stride);
    V row[kVectors];
    WEFT_UNROLL for (int x = 0; x < kVectors; ++x) row[x] = S::load(v + j * v_stride + x * S::kLanes);
    WEFT_UNROLL for (int x = 0; x < kVectors; ++x) sum[0][x] = S::template fma_lane<0>(sum[0][x], row[x], quad);
    WEFT_UNROLL for (int x = 0; x < kVectors; ++x) sum[1][x] = S::template fma_lane<1>(sum[1][x], row[x], quad);
    WEFT_UNROLL for (int x = 0; x < kVectors; ++x) sum[2][x] = S::template fma_lane<2>(sum[2][x], row[x], quad);
    WEFT_UNROLL for (int x = 0; x < kVectors; ++x) sum[3][x] = S::template fma_lane<3>(sum[3][x], row[x], quad);
  };
  Index j = 0;
  if constexpr (S::kBlocked) {
#pragma GCC unroll 1
    for (; j + 1 < n; j += 2) {
      step(j);
      step(j + 1);
    }
  }
#pragma GCC unroll 1
  for (; j < n; ++j) step(j);
  WEFT_UNROLL for (int r = 0; r < kRows; ++r) {
    WEFT_UNROLL for (int x = 0; x < kVectors; ++x) S::store(c + r * c_stride + x * S::kLanes, sum[r][x]);
  }
}

}  // namespace weft::cpu
