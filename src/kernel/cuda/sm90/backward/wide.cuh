// The backward on Hopper for widths of 192 (V: 128) and 256: as backward.cuh, but for the math. An item is 64 keys,
// since their dK and dV fill the registers of both warpgroups.
//
// Both have the same keys. Of S^T = K·Q^T and dP^T = V·dO^T each makes those of half of a tile's rows, and leaves P^T
// and dS^T in shared memory. When both have, each multiplies for some columns of dV, dK and dQ, by boxes of 64: no
// barrier but this one, once a step, because P and dS have two buffers.
//
// In a step dV and dK are issued, then S and dP of the next step, then a box of dQ, which runs while P and dS of the
// next step are made, then the other box. dQ is added to f32 sums in device memory, its last box a step late, while
// products run. More sums under way at once (a box of dQ beside dK, dV, S and dP) and the assembler serializes all
// products.
#pragma once

#include "cuda/launch.h"
#include "kernel/cuda/sm90/backward/probabilities.cuh"
#include "kernel/cuda/sm90/backward/producer.cuh"
#include "kernel/cuda/sm90/backward/store.cuh"
#include "kernel/cuda/sm90/ptx/wgmma.cuh"

namespace weft::cuda::sm90 {

// Boxes of columns that a warpgroup makes; the second one's follow the first one's.
struct WideShare {
  int dk, dv, dq;
};
__host__ __device__ constexpr WideShare wide_share(Width w, int group) {
  if (w == Width::w256) return {2, 2, 2};
  return group == 0 ? WideShare{2, 1, 1} : WideShare{1, 1, 2};
}

// kGroup: whose share it is; where both are alike the same code runs for both.
template <class N, Width kWidth, bool kBent, Dq kDq, int kGroup>
struct WideMath {
  static constexpr BackwardShape kShape = backward_shape(kWidth);
  static constexpr WideShare kShare = wide_share(kWidth, kGroup), kFirst = wide_share(kWidth, 0);
  static constexpr bool kBf16 = std::is_same_v<N, Bf16>, kMakesDq = kDq != Dq::elsewhere;
  static constexpr int kK = kShape.k, kV = kShape.v, kRows = 64, kKeys = 64, kOwnRows = 32, kSize = kOwnRows / 2;
  // dK and dV leave S and dP no registers but those that dQ is sent from. S then comes before what is still to be sent,
  // and dQ after P, when it has been.
  static constexpr bool kFull = kShare.dk + kShare.dv == 4;
  static constexpr int kLastBox = kShare.dq - 1;  // of dQ
  using Ahead = StatisticsAhead<kBent ? 0 : 2>;
  static constexpr unsigned kBox = 64 * 128;  // of 64 rows or keys
  static_assert(kShape.rows() == kRows && kShape.keys == kKeys && kShape.stages == 2 && kShape.p_buffers == 2);

  const BackwardCall& call;
  const BackwardShared<kWidth, kDq> shared;
  const int group;  // of warps
  float dk[32 * kShare.dk], dv[32 * kShare.dv];
  int at = 0;  // stage, and buffer of P and dS
  unsigned parity = 0;
  float* dq_at;  // where the lane added last, as in BackwardMath
  int dq_tile = 0;

  __device__ __forceinline__ WideMath(const BackwardCall& c, const BackwardShared<kWidth, kDq>& sh, int g)
      : call(c),
        shared(sh),
        group(g),
        dq_at(c.dq_sums + group * (kFirst.dq * 64 * 64) + static_cast<int>(threadIdx.x % 128) * 4) {}

  // The group's first box of a tile.
  __device__ __forceinline__ unsigned first_box(int boxes) const { return static_cast<unsigned>(group * boxes) * kBox; }

  // Sums [64 keys][own rows]: keys' rows of K or V times those of Q or dO.
  template <int kColumns>
  __device__ __forceinline__ void multiply_rows(float (&sums)[kSize], unsigned keys, unsigned rows) const {
    const unsigned a = tile_at(keys), b = tile_at(rows + static_cast<unsigned>(group * kOwnRows * 128));
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      const unsigned further = static_cast<unsigned>(i / 4) * kBox + static_cast<unsigned>(i % 4 * 32);
      product<kBf16>(sums, moved(a, further), moved(b, further), i > 0);
    }
    products_commit();
  }
  // Sums [64 keys][own columns] += of[keys][rows] · rows.
  template <int kNumbers>
  __device__ __forceinline__ void add_rows(float (&sums)[kNumbers], unsigned of, unsigned rows) const {
    const unsigned a = tile_at(of), b = tile_at<kBox>(rows);
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i)
      product_right_columns<kBf16>(sums, moved(a, static_cast<unsigned>(i * 32)),
                                   moved(b, static_cast<unsigned>(i * 2048)), true);
  }
  __device__ __forceinline__ void add_both() {
    add_rows(dv, shared.p(at), shared.dout(at) + first_box(kFirst.dv));
    add_rows(dk, shared.ds(at), shared.q(at) + first_box(kFirst.dk));
    products_commit();
  }
  // A box of the group's dQ.
  __device__ __forceinline__ void multiply_dq(float (&sums)[32], int box) const {
    const unsigned a = tile_at(shared.ds(at));
    const unsigned b = tile_at<kBox>(shared.k() + first_box(kFirst.dq) + static_cast<unsigned>(box) * kBox);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
      product_columns<kBf16>(sums, moved(a, static_cast<unsigned>(i * 2048)), moved(b, static_cast<unsigned>(i * 2048)),
                             i > 0);
    products_commit();
  }
  __device__ __forceinline__ void add_dq(const float (&x)[32], int box, int tile) {
    dq_at += static_cast<Index>(tile - dq_tile) * (kRows * kK);
    dq_tile = tile;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float four[4] = {x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]};
      add_four(dq_at + (box * 8 + j) * 512, four);
    }
  }

  // What is known of a step, also when its stage has been given back.
  struct Step {
    int flags, tile;
    bool last;
  };
  __device__ __forceinline__ Step step_of(int stage) const {
    const int flags = read_word(shared.step(stage));
    return {flags, read_sums(shared.step(stage)), (flags & RowStep::kLast) != 0};
  }
  __device__ __forceinline__ unsigned own_rows(unsigned statistics) const {
    return statistics + static_cast<unsigned>(group * kOwnRows * 4);
  }
  // P and dS of a stage, left in shared memory, of scores that are under way: kPending groups of products came after
  // them. Numbers of P stay in s, for dS.
  template <int kPending>
  __device__ __forceinline__ void make_p(float (&s)[kSize], int flags, int stage) const {
    unsigned p[kSize / 2];
    const Ahead lse(own_rows(shared.lse(stage)));
    products_wait<kPending>();
    settle(s);
    const StepPlace place{flags, shared.step(stage), first_key_of_lane(), group * kOwnRows};
    if constexpr (kBent)
      bent_shares<N>(call, s, p, lse, place);
    else
      plain_shares<N>(call, s, p, lse, place);
    keep_rows<kOwnRows, kKeys>(p, shared.p(stage), 0, group * kOwnRows);
  }
  template <int kPending>
  __device__ __forceinline__ void make_ds(const float (&s)[kSize], float (&dp)[kSize], int stage) const {
    unsigned ds[kSize / 2];
    const Ahead delta(own_rows(shared.delta(stage)));
    products_wait<kPending>();
    settle(dp);
    score_gradients<N>(call, ds, s, dp, delta);
    keep_rows<kOwnRows, kKeys>(ds, shared.ds(stage), 0, group * kOwnRows);
    stores_visible();
  }
  __device__ __forceinline__ void await_stage(int stage, unsigned of) const {
    wait(shared.q_full(stage), of);
    wait(shared.dout_full(stage), of);
  }
  __device__ __forceinline__ void free_stage() const {
    if (arrives()) {
      arrive(shared.q_free(at));
      arrive(shared.dout_free(at));
    }
  }
  __device__ __forceinline__ void next_stage() {
    if (at == 1) parity ^= 1;
    at = static_cast<int>(same_in_all_lanes(static_cast<unsigned>(at ^ 1)));
  }
  // P and dS of a stage are there, both groups'. Each waits at a barrier of its own that the other arrives at: a
  // barrier reached from two places of the code (at 192 columns the groups have code of their own) is nothing synccheck
  // takes. Two pairs, as one group may be a stage ahead.
  __device__ __forceinline__ void await_both(int stage) const {
    named_arrive(1 + 2 * stage + (1 - group), 256);
    named_sync(1 + 2 * stage + group, 256);
  }

  // All rows of an item.
  __device__ __forceinline__ void attend() {
    Step step = first_scores();
    float late[32];  // dQ of the step before, its last box
    int late_tile = -1;
    while (!step.last) {
      float s[kSize], dp[kSize], dq[32];
      const int next = at ^ 1;
      const auto add_late = [&] {
        if (kMakesDq && late_tile >= 0) add_dq(late, kLastBox, late_tile);
      };
      const auto begin_dq = [&] {
        products_begin();
        multiply_dq(dq, 0);
      };
      products_begin();
      add_both();
      if constexpr (!kFull) add_late();
      await_stage(next, parity ^ static_cast<unsigned>(at));
      products_begin();
      multiply_rows<kK>(s, shared.k(), shared.q(next));
      if constexpr (kFull) {
        add_late();
        products_begin();
      }
      multiply_rows<kV>(dp, shared.v(), shared.dout(next));
      products_wait<2>();
      free_stage();
      late_tile = step.tile;
      if constexpr (kMakesDq && !kFull) begin_dq();
      step = step_of(next);
      make_p<kMakesDq && !kFull ? 2 : 1>(s, step.flags, next);
      if constexpr (kMakesDq && kFull) begin_dq();
      make_ds<kMakesDq ? 1 : 0>(s, dp, next);
      if constexpr (kMakesDq) end_dq(dq, late, late_tile);
      await_both(next);
      next_stage();
    }
    last_sums(step.tile, late, late_tile);
  }
  // The rest of a step's dQ, whose first box is under way: its last one is left for later.
  __device__ __forceinline__ void end_dq(float (&first)[32], float (&late)[32], int tile) {
    float last[32];
    if constexpr (kLastBox == 1) {
      products_begin();
      multiply_dq(last, 1);
      products_wait<1>();
      settle(first);
      add_dq(first, 0, tile);
    }
    products_wait<0>();
    settle(kLastBox == 1 ? last : first);
#pragma unroll
    for (int i = 0; i < 32; ++i) late[i] = kLastBox == 1 ? last[i] : first[i];
  }
  __device__ __forceinline__ Step first_scores() const {
    float s[kSize], dp[kSize];
    await_stage(at, parity);
    products_begin();
    multiply_rows<kK>(s, shared.k(), shared.q(at));
    multiply_rows<kV>(dp, shared.v(), shared.dout(at));
    const Step step = step_of(at);
    make_p<1>(s, step.flags, at);
    make_ds<0>(s, dp, at);
    await_both(at);
    return step;
  }
  __device__ __forceinline__ void last_sums(int tile, const float (&late)[32], int late_tile) {
    products_begin();
    add_both();
    if (kMakesDq && late_tile >= 0) add_dq(late, kLastBox, late_tile);
    products_wait<0>();
    settle(dk);
    settle(dv);
    free_stage();
#pragma unroll
    for (int box = 0; kMakesDq && box <= kLastBox; ++box) {
      float dq[32];
      products_begin();
      multiply_dq(dq, box);
      products_wait<0>();
      settle(dq);
      add_dq(dq, box, tile);
    }
    next_stage();
  }

  __device__ __forceinline__ void run() {
    for (unsigned keys_parity = 0;; keys_parity ^= 1) {
      wait(shared.keys_full(), keys_parity);
      const int flags = SharedItem::read(shared.item()).flags;
      if (SharedItem::read(shared.item()).begin < 0) return;
#pragma unroll
      for (int i = 0; i < 32 * kShare.dk; ++i) dk[i] = 0;
#pragma unroll
      for (int i = 0; i < 32 * kShare.dv; ++i) dv[i] = 0;
      if ((flags & SharedItem::kUsed) != 0) attend();
      const SharedItem item = SharedItem::read(shared.item());
      __syncwarp();
      if (arrives()) arrive(shared.keys_free());  // the next ones come while these are written
      const int first = first_key_of_lane(), live = live_keys(call, item, first);
      store_keys<N>(call, call.dk, call.wide_dk, dk, item, first, live, group * (kFirst.dk * 64));
      store_keys<N>(call, call.dv, call.wide_dv, dv, item, first, live, group * (kFirst.dv * 64));
    }
  }
};

template <class N, Width kWidth, bool kBent, Dq kDq>
__global__ void __launch_bounds__(backward_shape(kWidth).threads(), 1)
    backward_wide_kernel(const __grid_constant__ BackwardCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kAlike = kWidth == Width::w256;
  extern __shared__ __align__(1024) unsigned char memory[];
  const BackwardShared<kWidth, kDq> shared = begin_block<kWidth, kDq>(memory);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), group = warp / 4;
  if (group == 0) {
    serve<kWidth, kDq>(call, shared, warp);
  } else {
    take_registers<backward_shape(kWidth).math_registers()>();
    if (kAlike || group == 1)
      WideMath<N, kWidth, kBent, kDq, 0>(call, shared, kAlike ? group - 1 : 0).run();
    else
      WideMath<N, kWidth, kBent, kDq, 1>(call, shared, 1).run();
  }
#else
  __trap();  // compiled for another GPU: the registry does not come here
#endif
}

template <class N, Width kWidth, bool kBent>
void launch_wide(const BackwardCall& call, cudaStream_t stream) {
  constexpr BackwardShape kShape = backward_shape(kWidth);
  static_assert(kShape.shared_bytes() <= 227 * 1024);
  launch(call.dq_sums != nullptr ? &backward_wide_kernel<N, kWidth, kBent, Dq::any_order>
                                 : &backward_wide_kernel<N, kWidth, kBent, Dq::elsewhere>,
         {dim3(static_cast<unsigned>(min(max(call.keys.active, call.unseen_tiles) * call.heads_k, call.processors))),
          dim3(kShape.threads()), static_cast<std::size_t>(kShape.shared_bytes()), call.early},
         stream, call);
}

template <class N>
void launch_any_wide(Width width, const BackwardCall& call, cudaStream_t stream) {
  const bool bent = call.scores.bend != 0;
  if (width == Width::w192_128)
    bent ? launch_wide<N, Width::w192_128, true>(call, stream) : launch_wide<N, Width::w192_128, false>(call, stream);
  else
    bent ? launch_wide<N, Width::w256, true>(call, stream) : launch_wide<N, Width::w256, false>(call, stream);
}

}  // namespace weft::cuda::sm90
