// A step of the backward with two turns at issuing products: S and dP; then dV, dK and dQ of the last step. While one
// warpgroup multiplies, the other one makes P and dS. The turns also say that the other's dS is there.
#pragma once

#include "kernel/cuda/sm90/backward/consumer.cuh"

namespace weft::cuda::sm90 {

template <class N, Width kWidth, bool kSoftcap, Dq kDq>
struct TwoSlots : BackwardConsumer<N, kWidth, kDq> {
  using Base = BackwardConsumer<N, kWidth, kDq>;
  using Base::Base, Base::kDimQk, Base::kDimV, Base::kRows, Base::kOwn;
  using Base::params, Base::shared, Base::warpgroup, Base::dk, Base::dv, Base::at, Base::parity;
  using Base::wait_for_slot, Base::store_ds, Base::mma_dq, Base::mma_last_dq, Base::next_buffer, Base::pass_slot;
  static constexpr bool kComputesDq = kDq != Dq::separate_kernel;
  static_assert(kDq != Dq::atomic);  // that has one turn, or three warpgroups
  // Rows of the next step are awaited before dQ leaves: 2 % faster.
  static constexpr bool kWaitsAhead = kDq == Dq::ordered;
  // A stage of rows, a buffer of dS and a part of dQ have one number.
  static_assert(Base::kShape.stages == 2 && Base::kShape.ds_buffers() == 2 && Base::kShape.parts() == 2);
  using Statistics = PrefetchedStatistics<kSoftcap ? 0 : 4>;

  __device__ __forceinline__ void run() {
    this->each_item([&] { attend(); },
                    [&] {
                      // Who adds is done too, but not before it has seen the part before.
                      if constexpr (kDq == Dq::ordered) {
                        mbarrier_wait(shared.part_free(warpgroup, at), parity ^ 1);
                        if (lane_arrives()) mbarrier_arrive(shared.part_full(warpgroup, at));
                      }
                    });
  }

  // dQ of the step before `at`.
  __device__ __forceinline__ void hand_over_dq(const float (&x)[kOwn / 2]) {
    mbarrier_wait(shared.part_free(warpgroup, at ^ 1), parity ^ static_cast<unsigned>(at));
    this->stage_dq(x, at ^ 1);
  }

  // What a step leaves to the next.
  struct Late {
    bool begun = false;  // there is dQ that the next step multiplies
    bool read = false;   // dS of the step before has been read
  };
  __device__ __forceinline__ void wait_for_rows(int stage, unsigned of) const {
    mbarrier_wait(shared.q_full(stage), of);
    mbarrier_wait(shared.dout_full(stage), of);
  }
  __device__ __forceinline__ void wait_for_next(int flags) const {
    if (kWaitsAhead && (flags & QueryStep::kLast) == 0) wait_for_rows(at ^ 1, parity ^ static_cast<unsigned>(at));
  }
  // All rows of an item.
  __device__ __forceinline__ void attend() {
    Late late;
    int flags = 0;
    if constexpr (kWaitsAhead) wait_for_rows(at, parity);
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
        if (late.read) mbarrier_arrive(shared.ds_free(at));
        mbarrier_arrive(shared.ds_free(at ^ 1));
      }
      hand_over_dq(dq);
    }
  }
  __device__ __forceinline__ int step(Late& late) {
    float s[kRows / 2], dp[kRows / 2];
    unsigned p[kRows / 4], g[kRows / 4];
    if constexpr (!kWaitsAhead) wait_for_rows(at, parity);
    wait_for_slot();
    wgmma_fence();
    this->template mma_keys_rows<kDimQk>(s, shared.k(), shared.q(at));
    this->template mma_keys_rows<kDimV>(dp, shared.v(), shared.dout(at));
    pass_slot();
    const int flags = ld_shared_s32(shared.step(at));
    Statistics lse(shared.lse(at));
    wgmma_wait_group<1>();
    warpgroup_fence_operand(s);
    // Said here, not where it is known: there the register of its place would wait for the additions that go out.
    if (kComputesDq && late.read && lane_arrives()) mbarrier_arrive(shared.ds_free(at));
    if constexpr (kSoftcap)
      softcap_probabilities<N>(params, s, p, lse, this->place(flags, at));
    else
      probabilities<N>(params, s, p, lse, this->place(flags, at));
    Statistics delta(shared.delta(at));
    wgmma_wait_group<0>();
    warpgroup_fence_operand(dp);
    score_gradients<N>(params, g, s, dp, delta);
    if constexpr (kComputesDq) {
      mbarrier_wait(shared.ds_free(at), parity ^ 1);
      store_ds(g, at);
      fence_proxy_async_shared();
    }
    float dq[kOwn / 2];
    wait_for_slot();
    warpgroup_fence_operand(p);
    warpgroup_fence_operand(g);
    wgmma_fence();
    this->template mma_accumulate<kDimV>(dv, p, shared.dout(at));
    this->template mma_accumulate<kDimQk>(dk, g, shared.q(at));
    wgmma_commit_group();
    if constexpr (kComputesDq) mma_dq(dq, at ^ 1);  // of the first step: of nothing, for nothing
    pass_slot();
    wait_for_next(flags);
    wgmma_wait_group<kComputesDq ? 1 : 0>();
    release_rows();
    if constexpr (kComputesDq) finish_dq(dq, late);
    return flags;
  }
  // Of rows that see none of the warpgroup's keys: zeros for dQ, and its part of dQ of the last step.
  __device__ __forceinline__ int idle_step(Late& late) {
    if constexpr (!kWaitsAhead) wait_for_rows(at, parity);
    wait_for_slot();
    pass_slot();
    const int flags = ld_shared_s32(shared.step(at));
    float dq[kOwn / 2];
    if constexpr (kComputesDq) {
      if (late.read && lane_arrives()) mbarrier_arrive(shared.ds_free(at));
      mbarrier_wait(shared.ds_free(at), parity ^ 1);
      const unsigned none[kRows / 4] = {};
      store_ds(none, at);
      fence_proxy_async_shared();
    }
    wait_for_slot();
    if constexpr (kComputesDq) {
      wgmma_fence();
      mma_dq(dq, at ^ 1);
    }
    pass_slot();
    wait_for_next(flags);
    release_rows();
    if constexpr (kComputesDq) finish_dq(dq, late);
    return flags;
  }
  __device__ __forceinline__ void release_rows() const {
    if (!lane_arrives()) return;
    mbarrier_arrive(shared.q_free(at));
    mbarrier_arrive(shared.dout_free(at));
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
