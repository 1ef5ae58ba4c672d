// A step of the backward with one ping-pong slot: dQ of the previous step, dV and dK of this step, S of the next step.
// When dV and dK are done the other consumer gets the slot, and dP of the next step is issued concurrently. P and dS of
// that step are computed while the other consumer has the slot. Passing the slot also signals that dS is stored.
//
// dK reads dS from shared memory, where it is needed for dQ anyway: beside S there are no registers for it.
#pragma once

#include "kernel/cuda/sm90/backward/consumer.cuh"

namespace weft::cuda::sm90 {

template <class N, Width kWidth, bool kSoftcap, Dq kDq>
struct OneSlot : BackwardConsumer<N, kWidth, kDq> {
  using Base = BackwardConsumer<N, kWidth, kDq>;
  using Base::add_dq, Base::wait_for_slot, Base::store_ds, Base::mma_dq, Base::mma_last_dq, Base::next_buffer,
      Base::pass_slot;
  using Base::kBf16, Base::kDimQk, Base::kDimV, Base::kRows, Base::kKeys, Base::kOwn;
  using Base::params, Base::shared, Base::warpgroup, Base::dk, Base::dv, Base::ds_buffer, Base::ds_phase;
  using Statistics = PipelinedStatistics<4, kRows / 16>;
  static constexpr int kStages = Base::kShape.stages;
  static_assert(kStages == 3 && kDq == Dq::atomic);

  PipelineState<kStages> rows;  // stage of the step whose P and dS are computed next

  __device__ __forceinline__ OneSlot(const BackwardParams& c, const BackwardSharedMemory<kWidth, kDq>& sh, int g)
      : Base(c, sh, g) {}
  __device__ __forceinline__ void run() {
    this->open_slots();
    this->each_item([&] { attend(); }, [] {});
  }

  __device__ __forceinline__ void attend() {
    const SharedItem item = SharedItem::read(shared.item());
    if (item.end - item.begin <= 64 * warpgroup) return attend_without_keys();
    unsigned p[kRows / 4];
    int before = -1, sums;  // tiles of dQ of the previous step and of this one
    int flags = begin(p, sums);
    while ((flags & QueryStep::kLast) == 0) flags = step(p, before, sums);
    end(p, before, sums);
  }
  // P and dS of the first step.
  __device__ __forceinline__ int begin(unsigned (&p)[kRows / 4], int& sums) {
    float s[kRows / 2], dp[kRows / 2];
    int flags;
    Statistics known = this->template mma_first_step<Statistics>(s, dp, rows, flags, sums);
    compute_p_ds(s, p, dp, known, flags);
    return flags;
  }
  // WGMMAs of a step, P and dS of the next.
  __device__ __forceinline__ int step(unsigned (&p)[kRows / 4], int& before, int& sums) {
    const PipelineState<kStages> last = rows;
    rows.advance();
    float s[kRows / 2], dp[kRows / 2], dq[kOwn / 2];
    wait_for_slot();
    warpgroup_fence_operand(p);
    wgmma_fence();
    const int flags = ld_shared_s32(shared.step(rows.index));
    Statistics known(shared.lse(rows.index), shared.delta(rows.index));
    mma_dq(dq, ds_buffer ^ 1);  // in the first step on stale dS, and discarded
    mma_dv_dk(p, last.index);
    this->template mma_keys_rows<kDimQk>(s, shared.k(), shared.q(rows.index));
    wgmma_wait_group<2>();
    warpgroup_fence_operand(dq);
    if (before >= 0) add_dq(dq, before);
    wgmma_wait_group<1>();
    pass_slot();
    wgmma_fence();
    this->template mma_keys_rows<kDimV>(dp, shared.v(), shared.dout(rows.index));
    release(last.index, before >= 0);
    before = sums;
    sums = read_sums(shared.step(rows.index));
    next_buffer();
    compute_p_ds(s, p, dp, known, flags);
    return flags;
  }
  // WGMMAs of the last step.
  __device__ __forceinline__ void end(unsigned (&p)[kRows / 4], int before, int sums) {
    float dq[kOwn / 2];
    wait_for_slot();
    warpgroup_fence_operand(p);
    wgmma_fence();
    mma_dq(dq, ds_buffer ^ 1);
    mma_dv_dk(p, rows.index);
    pass_slot();
    wgmma_wait_group<0>();
    warpgroup_fence_operand(dq);
    warpgroup_fence_operand(dk);
    warpgroup_fence_operand(dv);
    end_dq(dq, before, sums);
  }
  // Adds dQ of the last step but one, then computes and adds that of the last step.
  __device__ __forceinline__ void end_dq(float (&dq)[kOwn / 2], int before, int sums) {
    release(rows.index, before >= 0);
    if (before >= 0) add_dq(dq, before);
    next_buffer();
    rows.advance();
    mma_last_dq(dq);
    if (lane_arrives()) mbarrier_arrive(shared.ds_free(ds_buffer ^ 1));
    add_dq(dq, sums);
  }

  // An item without keys for this consumer: it stores zeros as dS and computes its part of dQ, and leaves all other
  // slots to the other consumer.
  __device__ __forceinline__ void attend_without_keys() {
    this->wait_for_rows(rows);
    int before = -1, sums = read_sums(shared.step(rows.index)), flags = ld_shared_s32(shared.step(rows.index));
    store_zero_ds(flags);
    float dq[kOwn / 2];
    while ((flags & QueryStep::kLast) == 0) {
      const int last = rows.index;
      rows.advance();
      mma_last_dq(dq);
      release(last, before >= 0);
      if (before >= 0) add_dq(dq, before);
      before = sums;
      sums = read_sums(shared.step(rows.index));
      flags = ld_shared_s32(shared.step(rows.index));
      next_buffer();
      store_zero_ds(flags);
    }
    mma_last_dq(dq);
    end_dq(dq, before, sums);
  }
  __device__ __forceinline__ void store_zero_ds(int flags) const {
    this->wait_for_next_rows(rows, flags);
    mbarrier_wait(shared.ds_free(ds_buffer), ds_phase ^ 1);
    const unsigned none[kRows / 4] = {};
    store_ds(none, ds_buffer);
    fence_proxy_async_shared();
  }

  __device__ __forceinline__ void mma_dv_dk(const unsigned (&p)[kRows / 4], int stage) {
    this->template mma_accumulate<kDimV>(dv, p, shared.dout(stage));
    const unsigned a = smem_descriptor(shared.ds(ds_buffer) + static_cast<unsigned>(warpgroup) * 8192),
                   b = smem_descriptor<kRows * 128>(shared.q(stage));
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i)
      wgmma_b_mn_major<kBf16>(dk, advance_descriptor(a, static_cast<unsigned>(i / 4 * kKeys * 128 + i % 4 * 32)),
                              advance_descriptor(b, static_cast<unsigned>(i * 2048)), true);
    wgmma_commit_group();
  }
  // Rounded P, and dS to shared memory, of the step whose S and dP were issued last.
  __device__ __forceinline__ void compute_p_ds(float (&s)[kRows / 2], unsigned (&p)[kRows / 4], float (&dp)[kRows / 2],
                                               Statistics& known, int flags) const {
    wgmma_wait_group<1>();
    warpgroup_fence_operand(s);
    if constexpr (kSoftcap)
      softcap_probabilities<N>(params, s, p, known, this->place(flags, rows.index));
    else
      probabilities<N>(params, s, p, known, this->place(flags, rows.index));
    // Waited for here, overlapping other waits; inside the slot the consumer would stall on the mbarrier.
    this->wait_for_next_rows(rows, flags);
    wgmma_wait_group<0>();
    warpgroup_fence_operand(dp);
    unsigned ds[kRows / 4];
    score_gradients<N>(params, ds, s, dp, known);
    mbarrier_wait(shared.ds_free(ds_buffer), ds_phase ^ 1);
    store_ds(ds, ds_buffer);
    fence_proxy_async_shared();
  }
  // Releases a step's rows, and dS of the step before it if there was one.
  __device__ __forceinline__ void release(int stage, bool had_before) const {
    if (!lane_arrives()) return;
    if (had_before) mbarrier_arrive(shared.ds_free(ds_buffer ^ 1));
    mbarrier_arrive(shared.q_free(stage));
    mbarrier_arrive(shared.dout_free(stage));
  }
};

}  // namespace weft::cuda::sm90
