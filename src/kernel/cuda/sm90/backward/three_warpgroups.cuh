// A step of the backward with three consumers, which only buffers synchronize: dV and dK of a step and S of the next
// step are issued together, dP of the next step when dV and dK are done. Two of the three compute P and dS while one
// has the tensor cores. One consumer computes a step's dQ, one step late, from the dS of all three: consumer b for a
// step in buffer b.
#pragma once

#include "kernel/cuda/sm90/backward/consumer.cuh"

namespace weft::cuda::sm90 {

template <class N, Width kWidth, Dq kDq>
struct ThreeWarpgroups : BackwardConsumer<N, kWidth, kDq> {
  using Base = BackwardConsumer<N, kWidth, kDq>;
  using Base::kDimQk, Base::kDimV, Base::kRows, Base::kOwn;
  using Base::params, Base::shared, Base::warpgroup, Base::keys, Base::dk, Base::dv;
  using Statistics = PipelinedStatistics<2, kRows / 16>;
  static constexpr int kStages = Base::kShape.stages;
  static constexpr bool kComputesDq = kDq != Dq::separate_kernel;
  static_assert(Base::kShape.ds_buffers() == 3 && kOwn == kRows);

  // The step whose P and dS are computed next: stage of its rows, and buffer of its dS.
  PipelineState<kStages> rows;
  PipelineState<3> ds;
  unsigned own_phase = 0;               // phase of the buffer whose dQ this consumer computes
  unsigned p[kRows / 4], g[kRows / 4];  // P and dS of a step, rounded

  __device__ __forceinline__ ThreeWarpgroups(const BackwardParams& c, const BackwardSharedMemory<kWidth, kDq>& sh,
                                             int g)
      : Base(c, sh, g) {}
  __device__ __forceinline__ void run() {
    this->each_item([&] { attend(); },
                    [&] {
                      // Ends the adding thread too, after it has added the previous part.
                      if constexpr (kDq == Dq::ordered) {
                        mbarrier_wait(shared.part_free(warpgroup, 0), own_phase ^ 1);
                        if (lane_arrives()) mbarrier_arrive(shared.part_full(warpgroup, 0));
                      }
                    });
  }

  __device__ __forceinline__ void attend() {
    int before = -1, sums;  // tiles of dQ of the previous step and of this one
    int flags = begin(sums);
    while ((flags & QueryStep::kLast) == 0) flags = step(before, sums);
    end(before, sums);
  }
  // P and dS of the first step.
  __device__ __forceinline__ int begin(int& sums) {
    float s[kRows / 2], dp[kRows / 2];
    int flags;
    Statistics known = this->template mma_first_step<Statistics>(s, dp, rows, flags, sums);
    compute_p_ds(s, dp, known, flags);
    return flags;
  }
  // dV and dK of a step, P and dS of the next.
  __device__ __forceinline__ int step(int& before, int& sums) {
    const int last = rows.index;
    rows.advance();
    float s[kRows / 2], dp[kRows / 2];
    compute_dq_before(s, before);
    warpgroup_fence_operand(p);
    warpgroup_fence_operand(g);
    wgmma_fence();
    const int flags = ld_shared_s32(shared.step(rows.index)), next_sums = read_sums(shared.step(rows.index));
    Statistics known(shared.lse(rows.index), shared.delta(rows.index));
    mma_dv_dk(last);
    this->template mma_keys_rows<kDimQk>(s, shared.k(keys.index), shared.q(rows.index));
    wgmma_wait_group<1>();
    release(last);
    wgmma_fence();
    this->template mma_keys_rows<kDimV>(dp, shared.v(keys.index), shared.dout(rows.index));
    before = sums;
    sums = next_sums;
    ds.advance();
    compute_p_ds(s, dp, known, flags);
    return flags;
  }
  // dV and dK of the last step, and the remaining dQ.
  __device__ __forceinline__ void end(int before, int sums) {
    float dq[kOwn / 2];
    compute_dq_before(dq, before);
    warpgroup_fence_operand(p);
    warpgroup_fence_operand(g);
    wgmma_fence();
    mma_dv_dk(rows.index);
    wgmma_wait_group<0>();
    warpgroup_fence_operand(dk);
    warpgroup_fence_operand(dv);
    release(rows.index);
    rows.advance();
    ds.advance();
    compute_dq_before(dq, sums);
  }

  __device__ __forceinline__ void mma_dv_dk(int stage) {
    this->template mma_accumulate<kDimV>(dv, p, shared.dout(stage));
    this->template mma_accumulate<kDimQk>(dk, g, shared.q(stage));
    wgmma_commit_group();
  }
  // dQ of the step before the one in buffer ds.index, if there was one and this consumer computes it. It uses the
  // registers of S, because ptxas finds too few for registers of its own.
  __device__ __forceinline__ void compute_dq_before(float (&dq)[kOwn / 2], int tile) {
    if constexpr (kComputesDq) {
      if (tile < 0 || (ds.index == 0 ? 2 : ds.index - 1) != warpgroup) return;
      mbarrier_wait(shared.ds_full(warpgroup), own_phase);
      fence_proxy_async_shared();  // for the stores of all three consumers, which do not wait
      wgmma_fence();
      this->mma_dq(dq, warpgroup);
      wgmma_wait_group<0>();
      warpgroup_fence_operand(dq);
      if (lane_arrives()) mbarrier_arrive(shared.ds_free(warpgroup));
      if constexpr (kDq == Dq::ordered) {
        mbarrier_wait(shared.part_free(warpgroup, 0), own_phase ^ 1);
        this->stage_dq(dq, 0);
      } else {
        this->add_dq(dq, tile);
      }
      own_phase ^= 1;
    }
  }
  // Rounded P, and dS also to shared memory, of the step whose S and dP were issued last. P is rounded late, because
  // before there are no registers for both.
  __device__ __forceinline__ void compute_p_ds(float (&s)[kRows / 2], float (&dp)[kRows / 2], Statistics& known,
                                               int flags) {
    wgmma_wait_group<1>();
    warpgroup_fence_operand(s);
    probabilities(params, s, known, this->place(flags, rows.index));
    this->wait_for_next_rows(rows, flags);
    wgmma_wait_group<0>();
    warpgroup_fence_operand(dp);
    score_gradients<N>(params, g, s, dp, known);
    if constexpr (kComputesDq) {
      mbarrier_wait(shared.ds_free(ds.index), ds.phase ^ 1);
      this->store_ds(g, ds.index);
    }
    round_pairs<N>(p, s);
    if constexpr (kComputesDq) {
      __syncwarp();
      if (lane_arrives()) mbarrier_arrive(shared.ds_full(ds.index));
    }
  }
  __device__ __forceinline__ void release(int stage) const {
    if (!lane_arrives()) return;
    mbarrier_arrive(shared.q_free(stage));
    mbarrier_arrive(shared.dout_free(stage));
  }
};

}  // namespace weft::cuda::sm90
