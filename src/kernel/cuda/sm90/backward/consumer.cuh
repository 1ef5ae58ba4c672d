// What the consumers of one_slot.cuh, two_slots.cuh, half_tiles.cuh and three_warpgroups.cuh share: a warpgroup's 64
// keys, its WGMMAs, and where their results go.
#pragma once

#include "kernel/cuda/sm90/backward/probabilities.cuh"
#include "kernel/cuda/sm90/backward/producer.cuh"
#include "kernel/cuda/sm90/backward/store_dk_dv.cuh"
#include "kernel/cuda/sm90/ptx/wgmma.cuh"

namespace weft::cuda::sm90 {

template <class N, Width kWidth, Dq kDq>
struct BackwardConsumer {
  static constexpr BackwardShape kShape = backward_shape(kWidth, kDq);
  static constexpr bool kBf16 = std::is_same_v<N, Bf16>;
  static constexpr int kDimQk = kShape.dim_qk, kDimV = kShape.dim_v, kRows = kShape.rows(), kKeys = kShape.keys;
  static constexpr int kOwn = kDimQk / kShape.parts_of_tile();  // columns of dQ that a warpgroup computes

  const BackwardParams& params;
  const BackwardSharedMemory<kWidth, kDq> shared;
  const int warpgroup;  // index of the consumer warpgroup
  float dk[kDimQk / 2], dv[kDimV / 2];
  PipelineState<kShape.key_buffers> keys;
  int ds_buffer = 0;
  unsigned ds_phase = 0;
  // Where the lane last added to dQ. The pointer moves from tile to tile: if it were computed anew for each, its
  // registers would be reused at once, which stalls until the additions are issued.
  float* dq_at;
  int dq_tile = 0;

  __device__ __forceinline__ BackwardConsumer(const BackwardParams& c, const BackwardSharedMemory<kWidth, kDq>& sh,
                                              int g)
      : params(c),
        shared(sh),
        warpgroup(g),
        dq_at(c.dq_sums + (kOwn == kDimQk ? 0 : warpgroup * (64 * kOwn)) + static_cast<int>(threadIdx.x % 128) * 4) {}

  __device__ __forceinline__ int first_key() const {
    return warpgroup * 64 + first_key_of_lane();
  }  // the lane's second key is 8 further
  __device__ __forceinline__ StepPlace place(int flags, int stage) const {
    return {flags, shared.step(stage), first_key(), 0};
  }
  __device__ __forceinline__ void next_buffer() {
    if (ds_buffer == 1) ds_phase ^= 1;
    ds_buffer ^= 1;
  }

  // [64 keys][rows] = the warpgroup's keys of K or V times rows of Q or dO.
  template <int kColumns>
  __device__ __forceinline__ void mma_keys_rows(float (&sums)[kRows / 2], unsigned keys, unsigned rows) const {
    const unsigned a = smem_descriptor(keys + static_cast<unsigned>(warpgroup) * 8192), b = smem_descriptor(rows);
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i)
      wgmma<kBf16>(sums, advance_descriptor(a, static_cast<unsigned>(i / 4 * kKeys * 128 + i % 4 * 32)),
                   advance_descriptor(b, static_cast<unsigned>(i / 4 * kRows * 128 + i % 4 * 32)), i > 0);
    wgmma_commit_group();
  }
  // accumulators [64 keys][columns] += of[keys][rows] · rows.
  template <int kColumns>
  __device__ __forceinline__ void mma_accumulate(float (&sums)[kColumns / 2], const unsigned (&of)[kRows / 4],
                                                 unsigned rows) {
    const unsigned b = smem_descriptor<kRows * 128>(rows);
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      const unsigned a[4] = {of[4 * i], of[4 * i + 1], of[4 * i + 2], of[4 * i + 3]};
      wgmma<kBf16>(sums, a, advance_descriptor(b, static_cast<unsigned>(i * 2048)), true);
    }
  }
  __device__ __forceinline__ void mma_dq(float (&sums)[kOwn / 2], int buffer) const {
    const unsigned a = smem_descriptor(shared.ds(buffer));
    const unsigned box = kOwn == kDimQk ? 0u : static_cast<unsigned>(warpgroup) * (kKeys * 128);
    const unsigned b = smem_descriptor<kKeys * 128>(shared.k(keys.index) + box);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
      wgmma_ab_mn_major<kBf16>(sums, advance_descriptor(a, static_cast<unsigned>(i * 2048)),
                               advance_descriptor(b, static_cast<unsigned>(i * 2048)), i > 0);
    wgmma_commit_group();
  }

  // dS^T to shared memory as [key][row].
  __device__ __forceinline__ void store_ds(const unsigned (&ds)[kRows / 4], int buffer) const {
    store_fragments<kRows, kKeys>(ds, shared.ds(buffer), warpgroup * 64, 0);
  }
  __device__ __forceinline__ void add_dq(const float (&x)[kOwn / 2], int tile) {
    dq_at += static_cast<Index>(tile - dq_tile) * (kRows * kDimQk);
    dq_tile = tile;
#pragma unroll
    for (int j = 0; j < kOwn / 8; ++j) {
      const float four[4] = {x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]};
      red_add_v4_f32(dq_at + j * 512, four);
    }
  }

  // Leaves dQ in shared memory for the thread that adds it.
  __device__ __forceinline__ void stage_dq(const float (&x)[kOwn / 2], int part) const {
    static_assert(64 * kOwn * 4 == BackwardShape::kPartBytes);
    const unsigned to = shared.part(warpgroup, part) + threadIdx.x % 128 * 16;
#pragma unroll
    for (int j = 0; j < kOwn / 8; ++j)
      asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};\n" ::"r"(to + static_cast<unsigned>(j * 2048)), "f"(x[4 * j]),
                   "f"(x[4 * j + 1]), "f"(x[4 * j + 2]), "f"(x[4 * j + 3])
                   : "memory");
    __syncwarp();
    if (lane_arrives()) mbarrier_arrive(shared.part_full(warpgroup, part));
  }

  // Waits for the rows of a step, and for those of the next step if there is one.
  template <int kStages>
  __device__ __forceinline__ void wait_for_rows(const PipelineState<kStages>& of) const {
    mbarrier_wait(shared.q_full(of.index), of.phase);
    mbarrier_wait(shared.dout_full(of.index), of.phase);
  }
  template <int kStages>
  __device__ __forceinline__ void wait_for_next_rows(const PipelineState<kStages>& rows, int flags) const {
    if ((flags & QueryStep::kLast) != 0) return;
    PipelineState<kStages> next = rows;
    next.advance();
    wait_for_rows(next);
  }

  // S and dP of an item's first step, and its flags and statistics.
  template <class Statistics, int kStages>
  __device__ __forceinline__ Statistics mma_first_step(float (&s)[kRows / 2], float (&dp)[kRows / 2],
                                                       const PipelineState<kStages>& rows, int& flags,
                                                       int& sums) const {
    wait_for_rows(rows);
    flags = ld_shared_s32(shared.step(rows.index));
    sums = read_sums(shared.step(rows.index));
    Statistics known(shared.lse(rows.index), shared.delta(rows.index));
    wgmma_fence();
    mma_keys_rows<kDimQk>(s, shared.k(keys.index), shared.q(rows.index));
    mma_keys_rows<kDimV>(dp, shared.v(keys.index), shared.dout(rows.index));
    return known;
  }

  // The ping-pong slots of two consumers.
  __device__ __forceinline__ void wait_for_slot() const { bar_sync(1 + warpgroup, 256); }
  __device__ __forceinline__ void pass_slot() const { bar_arrive(2 - warpgroup, 256); }
  // Before the first item.
  __device__ __forceinline__ void open_slots() const {
    if (warpgroup == 1) pass_slot();
  }

  // dQ of the last step, once the other consumer has stored its dS.
  __device__ __forceinline__ void mma_last_dq(float (&dq)[kOwn / 2]) const {
    wait_for_slot();
    wgmma_fence();
    mma_dq(dq, ds_buffer ^ 1);
    pass_slot();
    wgmma_wait_group<0>();
    warpgroup_fence_operand(dq);
  }

  __device__ __forceinline__ void store_both(const SharedItem& item) const {
    const int live = live_keys(params, item, first_key());
    const int part = params.keys.parts != nullptr ? params.keys.parts[item.first] : -1;
    if (part >= 0) {
      const Index keys = (static_cast<Index>(part) * params.heads_k + item.kv_head) * kKeys + warpgroup * 64;
      store_part(params.dk_parts + keys * kDimQk, dk, live);
      store_part(params.dv_parts + keys * kDimV, dv, live);
      return;
    }
    store_keys<N>(params, params.dk, params.vec8_dk, dk, item, first_key(), live);
    store_keys<N>(params, params.dv, params.vec8_dv, dv, item, first_key(), live);
  }
  // All items. `attend` processes an item's rows; `end` is called when there is no more work.
  template <class Attend, class End>
  __device__ __forceinline__ void each_item(const Attend& attend, const End& end) {
    for (;; keys.advance()) {
      mbarrier_wait(shared.keys_full(keys.index), keys.phase);
      const int flags = SharedItem::read(shared.item(keys.index)).flags;
      if (SharedItem::read(shared.item(keys.index)).begin < 0) return end();
#pragma unroll
      for (int i = 0; i < kDimQk / 2; ++i) dk[i] = 0;
#pragma unroll
      for (int i = 0; i < kDimV / 2; ++i) dv[i] = 0;
      if ((flags & SharedItem::kUsed) != 0) attend();
      const SharedItem item = SharedItem::read(shared.item(keys.index));
      __syncwarp();
      if (lane_arrives())
        mbarrier_arrive(shared.keys_free(keys.index));  // the next item's keys are loaded while these are written
      store_both(item);
    }
  }
};

}  // namespace weft::cuda::sm90
