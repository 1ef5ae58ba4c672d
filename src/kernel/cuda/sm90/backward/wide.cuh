// The backward kernel for 256 columns: as launch.cuh, but with other consumers. An item is 64 keys, because their dK
// and dV fill the registers of both consumers.
//
// Both consumers have the same keys. Of S^T = K·Q^T and dP^T = V·dO^T each computes half of a tile's rows, and leaves
// P^T and dS^T in shared memory. When both have, each computes some columns of dV, dK and dQ, in boxes of 64. That is
// the only barrier of a step, because P and dS have two buffers.
//
// In a step dV and dK are issued, then S and dP of the next step, then a box of dQ, which runs while P and dS of the
// next step are computed, then the other box. dQ is added to f32 sums in global memory, its last box one step late,
// while WGMMA runs. With more accumulators in flight (a box of dQ beside dK, dV, S and dP) ptxas serializes all WGMMA.
#pragma once

#include "cuda/launch.h"
#include "kernel/cuda/sm90/backward/probabilities.cuh"
#include "kernel/cuda/sm90/backward/producer.cuh"
#include "kernel/cuda/sm90/backward/store_dk_dv.cuh"
#include "kernel/cuda/sm90/ptx/wgmma.cuh"

namespace weft::cuda::sm90 {

template <class N, bool kSoftcap, Dq kDq>
struct WideConsumer {
  static constexpr Width kWidth = Width::w256;
  static constexpr BackwardShape kShape = backward_shape(kWidth);
  static constexpr int kBoxes = 2;  // boxes of columns of dK, dV and dQ that a consumer computes, one after another
  static constexpr bool kBf16 = std::is_same_v<N, Bf16>, kComputesDq = kDq != Dq::separate_kernel;
  static constexpr int kDimQk = kShape.dim_qk, kDimV = kShape.dim_v, kRows = 64, kKeys = 64, kOwnRows = 32,
                       kSize = kOwnRows / 2;
  static constexpr int kLastBox = kBoxes - 1;  // last box of dQ
  using Statistics = PrefetchedStatistics<kSoftcap ? 0 : 2>;
  static constexpr unsigned kBox = 64 * 128;  // bytes of 64 rows or keys
  static_assert(kShape.rows() == kRows && kShape.keys == kKeys && kShape.stages == 2 && kShape.p_buffers == 2);

  const BackwardParams& params;
  const BackwardSharedMemory<kWidth, kDq> shared;
  const int warpgroup;  // index of the consumer warpgroup
  float dk[32 * kBoxes], dv[32 * kBoxes];
  int current = 0;  // stage, and buffer of P and dS
  unsigned phase = 0;
  float* dq_at;  // where the lane last added, as in BackwardConsumer
  int dq_tile = 0;

  __device__ __forceinline__ WideConsumer(const BackwardParams& c, const BackwardSharedMemory<kWidth, kDq>& sh, int g)
      : params(c),
        shared(sh),
        warpgroup(g),
        dq_at(c.dq_sums + warpgroup * (kBoxes * 64 * 64) + static_cast<int>(threadIdx.x % 128) * 4) {}

  // The consumer's first box of a tile.
  __device__ __forceinline__ unsigned first_box() const { return static_cast<unsigned>(warpgroup * kBoxes) * kBox; }

  // [64 keys][own rows] = keys of K or V times rows of Q or dO.
  template <int kColumns>
  __device__ __forceinline__ void mma_keys_rows(float (&sums)[kSize], unsigned keys, unsigned rows) const {
    const unsigned a = smem_descriptor(keys),
                   b = smem_descriptor(rows + static_cast<unsigned>(warpgroup * kOwnRows * 128));
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      const unsigned further = static_cast<unsigned>(i / 4) * kBox + static_cast<unsigned>(i % 4 * 32);
      wgmma<kBf16>(sums, advance_descriptor(a, further), advance_descriptor(b, further), i > 0);
    }
    wgmma_commit_group();
  }
  // accumulators [64 keys][own columns] += of[keys][rows] · rows.
  template <int kNumbers>
  __device__ __forceinline__ void mma_accumulate(float (&sums)[kNumbers], unsigned of, unsigned rows) const {
    const unsigned a = smem_descriptor(of), b = smem_descriptor<kBox>(rows);
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i)
      wgmma_b_mn_major<kBf16>(sums, advance_descriptor(a, static_cast<unsigned>(i * 32)),
                              advance_descriptor(b, static_cast<unsigned>(i * 2048)), true);
  }
  __device__ __forceinline__ void mma_dv_dk() {
    mma_accumulate(dv, shared.p(current), shared.dout(current) + first_box());
    mma_accumulate(dk, shared.ds(current), shared.q(current) + first_box());
    wgmma_commit_group();
  }
  // A box of the consumer's dQ.
  __device__ __forceinline__ void mma_dq(float (&sums)[32], int box) const {
    const unsigned a = smem_descriptor(shared.ds(current));
    const unsigned b = smem_descriptor<kBox>(shared.k() + first_box() + static_cast<unsigned>(box) * kBox);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
      wgmma_ab_mn_major<kBf16>(sums, advance_descriptor(a, static_cast<unsigned>(i * 2048)),
                               advance_descriptor(b, static_cast<unsigned>(i * 2048)), i > 0);
    wgmma_commit_group();
  }
  __device__ __forceinline__ void add_dq(const float (&x)[32], int box, int tile) {
    dq_at += static_cast<Index>(tile - dq_tile) * (kRows * kDimQk);
    dq_tile = tile;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float four[4] = {x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]};
      red_add_v4_f32(dq_at + (box * 8 + j) * 512, four);
    }
  }

  // What is needed of a step after its stage is released.
  struct Step {
    int flags, tile;
    bool last;
  };
  __device__ __forceinline__ Step step_of(int stage) const {
    const int flags = ld_shared_s32(shared.step(stage));
    return {flags, read_sums(shared.step(stage)), (flags & QueryStep::kLast) != 0};
  }
  __device__ __forceinline__ unsigned own_rows(unsigned statistics) const {
    return statistics + static_cast<unsigned>(warpgroup * kOwnRows * 4);
  }
  // P and dS of a stage, to shared memory. kPending groups of WGMMA were issued after the scores. P stays in s, for dS.
  template <int kPending>
  __device__ __forceinline__ void compute_p(float (&s)[kSize], int flags, int stage) const {
    unsigned p[kSize / 2];
    const Statistics lse(own_rows(shared.lse(stage)));
    wgmma_wait_group<kPending>();
    warpgroup_fence_operand(s);
    const StepPlace place{flags, shared.step(stage), first_key_of_lane(), warpgroup * kOwnRows};
    if constexpr (kSoftcap)
      softcap_probabilities<N>(params, s, p, lse, place);
    else
      probabilities<N>(params, s, p, lse, place);
    store_fragments<kOwnRows, kKeys>(p, shared.p(stage), 0, warpgroup * kOwnRows);
  }
  template <int kPending>
  __device__ __forceinline__ void compute_ds(const float (&s)[kSize], float (&dp)[kSize], int stage) const {
    unsigned ds[kSize / 2];
    const Statistics delta(own_rows(shared.delta(stage)));
    wgmma_wait_group<kPending>();
    warpgroup_fence_operand(dp);
    score_gradients<N>(params, ds, s, dp, delta);
    store_fragments<kOwnRows, kKeys>(ds, shared.ds(stage), 0, warpgroup * kOwnRows);
    fence_proxy_async_shared();
  }
  __device__ __forceinline__ void wait_for_stage(int stage, unsigned of) const {
    mbarrier_wait(shared.q_full(stage), of);
    mbarrier_wait(shared.dout_full(stage), of);
  }
  __device__ __forceinline__ void free_stage() const {
    if (lane_arrives()) {
      mbarrier_arrive(shared.q_free(current));
      mbarrier_arrive(shared.dout_free(current));
    }
  }
  __device__ __forceinline__ void next_stage() {
    if (current == 1) phase ^= 1;
    current = static_cast<int>(warp_uniform(static_cast<unsigned>(current ^ 1)));
  }
  // Waits until both consumers have stored P and dS of a stage. Each waits at a named barrier at which the other
  // arrives: synccheck rejects one barrier that is reached from two places in the code. There are two pairs, because
  // one consumer may be a stage ahead.
  __device__ __forceinline__ void wait_for_both(int stage) const {
    bar_arrive(1 + 2 * stage + (1 - warpgroup), 256);
    bar_sync(1 + 2 * stage + warpgroup, 256);
  }

  // All rows of an item.
  __device__ __forceinline__ void attend() {
    // dK and dV leave S and dP only the registers that dQ is added from. So S comes before the pending additions, and
    // dQ after P, when they are done.
    Step step = first_scores();
    float late[32];  // last box of dQ of the step before
    int late_tile = -1;
    while (!step.last) {
      float s[kSize], dp[kSize], dq[32];
      const int next = current ^ 1;
      wgmma_fence();
      mma_dv_dk();
      wait_for_stage(next, phase ^ static_cast<unsigned>(current));
      wgmma_fence();
      mma_keys_rows<kDimQk>(s, shared.k(), shared.q(next));
      if (kComputesDq && late_tile >= 0) add_dq(late, kLastBox, late_tile);
      wgmma_fence();
      mma_keys_rows<kDimV>(dp, shared.v(), shared.dout(next));
      wgmma_wait_group<2>();
      free_stage();
      late_tile = step.tile;
      step = step_of(next);
      compute_p<1>(s, step.flags, next);
      if constexpr (kComputesDq) {
        wgmma_fence();
        mma_dq(dq, 0);
      }
      compute_ds<kComputesDq ? 1 : 0>(s, dp, next);
      if constexpr (kComputesDq) end_dq(dq, late, late_tile);
      wait_for_both(next);
      next_stage();
    }
    last_sums(step.tile, late, late_tile);
  }
  // The rest of a step's dQ, whose first box is in flight: its last box is left for later.
  __device__ __forceinline__ void end_dq(float (&first)[32], float (&late)[32], int tile) {
    float last[32];
    wgmma_fence();
    mma_dq(last, kLastBox);
    wgmma_wait_group<1>();
    warpgroup_fence_operand(first);
    add_dq(first, 0, tile);
    wgmma_wait_group<0>();
    warpgroup_fence_operand(last);
#pragma unroll
    for (int i = 0; i < 32; ++i) late[i] = last[i];
  }
  __device__ __forceinline__ Step first_scores() const {
    float s[kSize], dp[kSize];
    wait_for_stage(current, phase);
    wgmma_fence();
    mma_keys_rows<kDimQk>(s, shared.k(), shared.q(current));
    mma_keys_rows<kDimV>(dp, shared.v(), shared.dout(current));
    const Step step = step_of(current);
    compute_p<1>(s, step.flags, current);
    compute_ds<0>(s, dp, current);
    wait_for_both(current);
    return step;
  }
  __device__ __forceinline__ void last_sums(int tile, const float (&late)[32], int late_tile) {
    wgmma_fence();
    mma_dv_dk();
    if (kComputesDq && late_tile >= 0) add_dq(late, kLastBox, late_tile);
    wgmma_wait_group<0>();
    warpgroup_fence_operand(dk);
    warpgroup_fence_operand(dv);
    free_stage();
#pragma unroll
    for (int box = 0; kComputesDq && box <= kLastBox; ++box) {
      float dq[32];
      wgmma_fence();
      mma_dq(dq, box);
      wgmma_wait_group<0>();
      warpgroup_fence_operand(dq);
      add_dq(dq, box, tile);
    }
    next_stage();
  }

  __device__ __forceinline__ void run() {
    for (unsigned keys_parity = 0;; keys_parity ^= 1) {
      mbarrier_wait(shared.keys_full(), keys_parity);
      const int flags = SharedItem::read(shared.item()).flags;
      if (SharedItem::read(shared.item()).begin < 0) return;
#pragma unroll
      for (int i = 0; i < 32 * kBoxes; ++i) dk[i] = 0;
#pragma unroll
      for (int i = 0; i < 32 * kBoxes; ++i) dv[i] = 0;
      if ((flags & SharedItem::kUsed) != 0) attend();
      const SharedItem item = SharedItem::read(shared.item());
      __syncwarp();
      if (lane_arrives())
        mbarrier_arrive(shared.keys_free());  // the next item's keys are loaded while these are written
      const int first = first_key_of_lane(), live = live_keys(params, item, first);
      store_keys<N>(params, params.dk, params.vec8_dk, dk, item, first, live, warpgroup * (kBoxes * 64));
      store_keys<N>(params, params.dv, params.vec8_dv, dv, item, first, live, warpgroup * (kBoxes * 64));
    }
  }
};

template <class N, bool kSoftcap, Dq kDq>
__global__ void __launch_bounds__(backward_shape(Width::w256).threads(), 1)
    backward_wide_kernel(const __grid_constant__ BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  const BackwardSharedMemory<Width::w256, kDq> shared = begin_block<Width::w256, kDq>(params, memory);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), warpgroup = warp / 4;
  if (warpgroup == 0) {
    run_producer<Width::w256, kDq>(params, shared, warp);
  } else {
    setmaxnreg_inc<backward_shape(Width::w256).consumer_registers()>();
    WideConsumer<N, kSoftcap, kDq>(params, shared, warpgroup - 1).run();
  }
#else
  __trap();  // compiled for another GPU; the registry never launches it there
#endif
}

template <class N, bool kSoftcap>
void launch_wide(const BackwardParams& params, cudaStream_t stream) {
  constexpr BackwardShape kShape = backward_shape(Width::w256);
  static_assert(kShape.shared_bytes() <= 227 * 1024);
  launch(
      params.dq_sums != nullptr ? &backward_wide_kernel<N, kSoftcap, Dq::atomic>
                                : &backward_wide_kernel<N, kSoftcap, Dq::separate_kernel>,
      {dim3(static_cast<unsigned>(min(max(params.keys.active, params.unseen_tiles) * params.heads_k, params.sm_count))),
       dim3(kShape.threads()), static_cast<std::size_t>(kShape.shared_bytes()), params.programmatic},
      stream, params);
}

template <class N>
void run_backward_wide(const BackwardParams& params, cudaStream_t stream) {
  params.scores.softcap_scale != 0 ? launch_wide<N, true>(params, stream) : launch_wide<N, false>(params, stream);
}

}  // namespace weft::cuda::sm90
