// A step of the backward with two ping-pong slots: S and dP; then dV, dK and dQ of the previous step. While one
// consumer has the slot, the other computes P and dS. Passing the slot also signals that dS is stored.
#pragma once

#include "kernel/cuda/sm90/backward/consumer.cuh"

namespace weft::cuda::sm90 {

template <class N, Width kWidth, bool kSoftcap, Dq kDq>
struct TwoSlots : BackwardConsumer<N, kWidth, kDq> {
  using Base = BackwardConsumer<N, kWidth, kDq>;
  using Base::Base, Base::kDimQk, Base::kDimV, Base::kRows, Base::kOwn;
  using Base::params, Base::shared, Base::warpgroup, Base::dk, Base::dv, Base::ds_buffer, Base::ds_phase;
  using Base::wait_for_slot, Base::store_ds, Base::mma_dq, Base::mma_last_dq, Base::next_buffer, Base::pass_slot;
  static constexpr bool kComputesDq = kDq != Dq::separate_kernel;
  static_assert(kDq != Dq::atomic);  // Dq::atomic has one slot, or three consumers
  // Waits for the next step's rows before dQ is handed over, which is 2 % faster.
  static constexpr bool kWaitsAhead = kDq == Dq::ordered;
  // A stage of rows, a buffer of dS and a part of dQ share one index.
  static_assert(Base::kShape.stages == 2 && Base::kShape.ds_buffers() == 2 && Base::kShape.parts() == 2);
  using Statistics = PrefetchedStatistics<kSoftcap ? 0 : 4>;

  __device__ __forceinline__ void run() {
    this->open_slots();
    this->each_item([&] { attend(); },
                    [&] {
                      // Ends the adding thread too, after it has added the previous part.
                      if constexpr (kDq == Dq::ordered) {
                        mbarrier_wait(shared.part_free(warpgroup, ds_buffer), ds_phase ^ 1);
                        if (lane_arrives()) mbarrier_arrive(shared.part_full(warpgroup, ds_buffer));
                      }
                    });
  }

  // dQ of the step before `at`.
  __device__ __forceinline__ void hand_over_dq(const float (&x)[kOwn / 2]) {
    mbarrier_wait(shared.part_free(warpgroup, ds_buffer ^ 1), ds_phase ^ static_cast<unsigned>(ds_buffer));
    this->stage_dq(x, ds_buffer ^ 1);
  }

  // What a step leaves to the next.
  struct Late {
    bool begun = false;  // the next step has a dQ to compute
    bool read = false;   // dS of the step before has been read
  };
  __device__ __forceinline__ void wait_for_rows(int stage, unsigned of) const {
    mbarrier_wait(shared.q_full(stage), of);
    mbarrier_wait(shared.dout_full(stage), of);
  }
  __device__ __forceinline__ void wait_for_next(int flags) const {
    if (kWaitsAhead && (flags & QueryStep::kLast) == 0)
      wait_for_rows(ds_buffer ^ 1, ds_phase ^ static_cast<unsigned>(ds_buffer));
  }
  // All rows of an item.
  __device__ __forceinline__ void attend() {
    Late late;
    int flags = 0;
    if constexpr (kWaitsAhead) wait_for_rows(ds_buffer, ds_phase);
    do {
      if ((flags & QueryStep::kNextIdle << warpgroup) != 0)
        flags = idle_step(late);
      else
        flags = step(late);
      next_buffer();
    } while ((flags & QueryStep::kLast) == 0);
    warpgroup_fence_operand(dk);
    warpgroup_fence_operand(dv);
    if constexpr (kComputesDq) {
      float dq[kOwn / 2];
      mma_last_dq(dq);
      if (lane_arrives()) {
        if (late.read) mbarrier_arrive(shared.ds_free(ds_buffer));
        mbarrier_arrive(shared.ds_free(ds_buffer ^ 1));
      }
      hand_over_dq(dq);
    }
  }
  __device__ __forceinline__ int step(Late& late) {
    float s[kRows / 2], dp[kRows / 2];
    unsigned p[kRows / 4], g[kRows / 4];
    if constexpr (!kWaitsAhead) wait_for_rows(ds_buffer, ds_phase);
    wait_for_slot();
    wgmma_fence();
    this->template mma_keys_rows<kDimQk>(s, shared.k(), shared.q(ds_buffer));
    this->template mma_keys_rows<kDimV>(dp, shared.v(), shared.dout(ds_buffer));
    pass_slot();
    const int flags = ld_shared_s32(shared.step(ds_buffer));
    Statistics lse(shared.lse(ds_buffer));
    wgmma_wait_group<1>();
    warpgroup_fence_operand(s);
    // Signalled here rather than when it is known, because there the address register would stall until the additions
    // are issued.
    if (kComputesDq && late.read && lane_arrives()) mbarrier_arrive(shared.ds_free(ds_buffer));
    if constexpr (kSoftcap)
      softcap_probabilities<N>(params, s, p, lse, this->place(flags, ds_buffer));
    else
      probabilities<N>(params, s, p, lse, this->place(flags, ds_buffer));
    Statistics delta(shared.delta(ds_buffer));
    wgmma_wait_group<0>();
    warpgroup_fence_operand(dp);
    score_gradients<N>(params, g, s, dp, delta);
    if constexpr (kComputesDq) {
      mbarrier_wait(shared.ds_free(ds_buffer), ds_phase ^ 1);
      store_ds(g, ds_buffer);
      fence_proxy_async_shared();
    }
    float dq[kOwn / 2];
    wait_for_slot();
    warpgroup_fence_operand(p);
    warpgroup_fence_operand(g);
    wgmma_fence();
    this->template mma_accumulate<kDimV>(dv, p, shared.dout(ds_buffer));
    this->template mma_accumulate<kDimQk>(dk, g, shared.q(ds_buffer));
    wgmma_commit_group();
    if constexpr (kComputesDq) mma_dq(dq, ds_buffer ^ 1);  // in the first step on stale dS, and discarded
    pass_slot();
    wait_for_next(flags);
    wgmma_wait_group<kComputesDq ? 1 : 0>();
    release_rows();
    if constexpr (kComputesDq) finish_dq(dq, late);
    return flags;
  }
  // No row sees any of this consumer's keys: it stores zeros as dS, and computes its part of dQ of the previous step.
  __device__ __forceinline__ int idle_step(Late& late) {
    if constexpr (!kWaitsAhead) wait_for_rows(ds_buffer, ds_phase);
    wait_for_slot();
    pass_slot();
    const int flags = ld_shared_s32(shared.step(ds_buffer));
    float dq[kOwn / 2];
    if constexpr (kComputesDq) {
      if (late.read && lane_arrives()) mbarrier_arrive(shared.ds_free(ds_buffer));
      mbarrier_wait(shared.ds_free(ds_buffer), ds_phase ^ 1);
      const unsigned none[kRows / 4] = {};
      store_ds(none, ds_buffer);
      fence_proxy_async_shared();
    }
    wait_for_slot();
    if constexpr (kComputesDq) {
      wgmma_fence();
      mma_dq(dq, ds_buffer ^ 1);
    }
    pass_slot();
    wait_for_next(flags);
    release_rows();
    if constexpr (kComputesDq) finish_dq(dq, late);
    return flags;
  }
  __device__ __forceinline__ void release_rows() const {
    if (!lane_arrives()) return;
    mbarrier_arrive(shared.q_free(ds_buffer));
    mbarrier_arrive(shared.dout_free(ds_buffer));
  }
  __device__ __forceinline__ void finish_dq(float (&dq)[kOwn / 2], Late& late) {
    wgmma_wait_group<0>();
    warpgroup_fence_operand(dq);
    late.read = late.begun;
    if (late.read) hand_over_dq(dq);
    late.begun = true;
  }
};

}  // namespace weft::cuda::sm90
