// A step of the backward at 192 columns (V: 128). dK and dV of a consumer's 64 keys take 160 of a thread's 240
// registers, so S and dP of a tile's 64 rows are computed in two halves of 32 rows.
//
// A step: S and dP of the first half; then those of the second half, and dV and dK of the first, which run while P and
// dS of the second half are computed; then dV and dK of the second half, and dQ of the step before. dQ = dS·K needs dS
// of both consumers, which goes through shared memory; dK reads it from there too. Of dQ's three boxes of 64 columns
// each consumer computes one, and half of the middle one, one after the other: with both in flight ptxas serializes all
// WGMMA.
#pragma once

#include "kernel/cuda/sm90/backward/consumer.cuh"

namespace weft::cuda::sm90 {

template <class N, Width kWidth, bool kSoftcap, Dq kDq>
struct HalfTiles : BackwardConsumer<N, kWidth, kDq> {
  using Base = BackwardConsumer<N, kWidth, kDq>;
  using Base::kBf16, Base::kDimQk, Base::kDimV, Base::kRows, Base::kKeys, Base::kShape;
  using Base::next_buffer;
  using Base::params, Base::shared, Base::warpgroup, Base::dk, Base::dv, Base::ds_buffer, Base::ds_phase;
  static constexpr bool kComputesDq = kDq != Dq::separate_kernel;
  static constexpr int kHalf = 32;  // rows of a half
  static constexpr unsigned kKeyBox = kKeys * 128, kRowBox = kRows * 128, kHalfBytes = kHalf * 128;
  static_assert(kRows == 64 && kKeys == 128 && kDimQk == 192 && kDq != Dq::ordered);
  // A stage of rows and a buffer of dS share one index.
  static_assert(kShape.stages == 2 && kShape.ds_buffers() == 2);
  using Statistics = PrefetchedStatistics<0>;
  using Scores = float[kHalf / 2];
  using Packed = unsigned[kHalf / 4];

  using Base::Base;
  __device__ __forceinline__ void run() {
    this->each_item([&] { attend(); }, [] {});
  }

  // S^T or dP^T of a half.
  template <int kColumns>
  __device__ __forceinline__ void mma_half(Scores& sums, unsigned keys, unsigned rows) const {
    const unsigned a = smem_descriptor(keys + static_cast<unsigned>(warpgroup) * 8192), b = smem_descriptor(rows);
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i)
      wgmma<kBf16>(
          sums, advance_descriptor(a, static_cast<unsigned>(i / 4) * kKeyBox + static_cast<unsigned>(i % 4 * 32)),
          advance_descriptor(b, static_cast<unsigned>(i / 4) * kRowBox + static_cast<unsigned>(i % 4 * 32)), i > 0);
  }
  __device__ __forceinline__ void mma_scores(Scores& s, Scores& dp, int stage, int half) const {
    const unsigned rows = static_cast<unsigned>(half) * kHalfBytes;
    mma_half<kDimQk>(s, shared.k(), shared.q(stage) + rows);
    mma_half<kDimV>(dp, shared.v(), shared.dout(stage) + rows);
    wgmma_commit_group();
  }
  // dV += P^T·dO and dK += dS^T·Q of a half. dK reads dS from shared memory: there are no registers to keep it in.
  __device__ __forceinline__ void mma_dv_dk(const Packed& p, int stage, int half) {
    const unsigned rows = static_cast<unsigned>(half) * kHalfBytes;
    const unsigned dout = smem_descriptor<kRowBox>(shared.dout(stage) + rows),
                   q = smem_descriptor<kRowBox>(shared.q(stage) + rows),
                   ds = smem_descriptor(shared.ds(stage) + static_cast<unsigned>(warpgroup) * 8192 +
                                        static_cast<unsigned>(half) * (kHalf * 2));
#pragma unroll
    for (int i = 0; i < kHalf / 16; ++i) {
      const unsigned a[4] = {p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
      wgmma<kBf16>(dv, a, advance_descriptor(dout, static_cast<unsigned>(i * 2048)), true);
    }
#pragma unroll
    for (int i = 0; i < kHalf / 16; ++i)
      wgmma_b_mn_major<kBf16>(dk, advance_descriptor(ds, static_cast<unsigned>(i * 32)),
                              advance_descriptor(q, static_cast<unsigned>(i * 2048)), true);
    wgmma_commit_group();
  }
  // Columns of dQ from dS of all keys, added to the sums at `to`, which may be null. `keys`: their columns of K.
  template <int kSize>
  __device__ __forceinline__ void compute_dq(float* to, unsigned keys, int buffer) const {
    float dq[kSize];
    const unsigned a = smem_descriptor(shared.ds(buffer)), b = smem_descriptor<kKeyBox>(keys);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
      wgmma_ab_mn_major<kBf16>(dq, advance_descriptor(a, static_cast<unsigned>(i * 2048)),
                               advance_descriptor(b, static_cast<unsigned>(i * 2048)), i > 0);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    warpgroup_fence_operand(dq);
    if (to == nullptr) return;
#pragma unroll
    for (int j = 0; j < kSize / 4; ++j) {
      const float four[4] = {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]};
      red_add_v4_f32(to + j * 512, four);
    }
  }
  // The consumer's part of dQ of the step before, once both consumers have stored its dS: a box of 64 columns, and half
  // of the middle box. `tile`: of dQ, or -1 if there is no step before; it is then computed on stale dS and discarded.
  __device__ __forceinline__ void add_dq(int tile) const {
    const int buffer = ds_buffer ^ 1;
    const unsigned own = static_cast<unsigned>(warpgroup);
    // Of 24 times eight columns the consumer's box begins with 0 or 16, its half of the middle box with 8 or 12.
    float* box = nullptr;
    float* half_box = nullptr;
    if (tile >= 0) {
      float* const sums =
          params.dq_sums + static_cast<Index>(tile) * (kRows * kDimQk) + static_cast<int>(threadIdx.x % 128) * 4;
      box = sums + warpgroup * (16 * 512);
      half_box = sums + (8 + warpgroup * 4) * 512;
      mbarrier_wait(shared.ds_full(buffer), ds_phase ^ static_cast<unsigned>(buffer));
    }
    compute_dq<32>(box, shared.k() + own * (2 * kKeyBox), buffer);
    compute_dq<16>(half_box, shared.k() + kKeyBox + own * 64, buffer);
    if (tile >= 0 && lane_arrives()) mbarrier_arrive(shared.ds_free(buffer));
  }

  // P of a half whose S and dP are there, and dS to shared memory.
  __device__ __forceinline__ void compute_p_ds(Scores& s, Scores& dp, Packed& p, int stage, int half) const {
    warpgroup_fence_operand(s);
    warpgroup_fence_operand(dp);
    const unsigned rows = static_cast<unsigned>(half) * (kHalf * 4);
    const Statistics lse(shared.lse(stage) + rows), delta(shared.delta(stage) + rows);
    const StepPlace place{flags_of(stage), shared.step(stage), this->first_key(), half * kHalf};
    if constexpr (kSoftcap)
      softcap_probabilities<N>(params, s, p, lse, place);
    else
      probabilities<N>(params, s, p, lse, place);
    unsigned ds[kHalf / 4];
    score_gradients<N>(params, ds, s, dp, delta);
    // Both consumers have computed dQ from what the buffer held before.
    if (kComputesDq && half == 0) mbarrier_wait(shared.ds_free(stage), ds_phase ^ 1);
    store_fragments<kHalf, kKeys>(ds, shared.ds(stage), warpgroup * 64, half * kHalf);
    fence_proxy_async_shared();
    bar_sync(1 + warpgroup, 128);  // all of the consumer's warps have stored theirs
  }
  __device__ __forceinline__ void wait_for_rows(int stage, unsigned of) const {
    mbarrier_wait(shared.q_full(stage), of);
    mbarrier_wait(shared.dout_full(stage), of);
  }
  __device__ __forceinline__ void release_rows(int stage) const {
    if (!lane_arrives()) return;
    mbarrier_arrive(shared.q_free(stage));
    mbarrier_arrive(shared.dout_free(stage));
  }
  __device__ __forceinline__ int flags_of(int stage) const { return ld_shared_s32(shared.step(stage)); }

  // All rows of an item.
  __device__ __forceinline__ void attend() {
    int before = -1;  // tile of dQ of the step before
    bool last = false;
    while (!last) {
      const int stage = ds_buffer;
      Packed p, p_late;
      wait_for_rows(stage, ds_phase);
      {
        Scores s, dp;
        wgmma_fence();
        mma_scores(s, dp, stage, 0);
        wgmma_wait_group<0>();
        compute_p_ds(s, dp, p, stage, 0);
      }
      {
        Scores s, dp;
        warpgroup_fence_operand(p);
        wgmma_fence();
        mma_scores(s, dp, stage, 1);
        mma_dv_dk(p, stage, 0);
        wgmma_wait_group<1>();
        compute_p_ds(s, dp, p_late, stage, 1);
        if (kComputesDq && lane_arrives()) mbarrier_arrive(shared.ds_full(stage));
        wgmma_wait_group<0>();
      }
      last = (flags_of(stage) & QueryStep::kLast) != 0;
      const int tile = read_sums(shared.step(stage));
      warpgroup_fence_operand(p_late);
      wgmma_fence();
      mma_dv_dk(p_late, stage, 1);
      if constexpr (kComputesDq) add_dq(before);
      wgmma_wait_group<0>();
      release_rows(stage);
      before = tile;
      next_buffer();
    }
    warpgroup_fence_operand(dk);
    warpgroup_fence_operand(dv);
    if constexpr (kComputesDq) add_dq(before);
  }
};

}  // namespace weft::cuda::sm90
