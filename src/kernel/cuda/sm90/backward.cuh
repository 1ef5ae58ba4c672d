// The backward on Hopper: one launch, as many blocks as multiprocessors, each taking items until there are none left.
//
// An item is 128 keys of one K/V head, and all query rows that see them pass by, for all heads of the group. dK and dV
// stay in registers, are written once, and have the same bits on every run.
//
// A warpgroup has 64 keys. S^T = K·Q^T and dP^T = V·dO^T are its sums, so P^T and dS^T are in its registers as the
// products for dV and dK want them. dS alone goes through shared memory, for dQ = dS·K, of which each warpgroup makes a
// part from all 128 keys, one step late, and adds it to f32 sums in device memory; or, in turn, leaves it in shared
// memory for a thread that waits until all additions that come before have been made.
//
// Warpgroups take turns at issuing products, two in a step: S and dP; then dV, dK and dQ of the last step. While one
// multiplies, the other one makes P and dS. The turns also say that the other's dS is there.
#pragma once

#include "cuda/launch.h"
#include "kernel/cuda/sm90/backward_fetch.cuh"
#include "kernel/cuda/sm90/backward_shares.cuh"
#include "kernel/cuda/sm90/backward_store.cuh"
#include "kernel/cuda/sm90/wgmma.cuh"

namespace weft::cuda::sm90 {

template <class N, Width kWidth, bool kBent, Dq kDq>
struct BackwardMath {
  static constexpr bool kMakesDq = kDq != Dq::elsewhere;
  static constexpr BackwardShape kShape = backward_shape(kWidth);
  static constexpr bool kBf16 = std::is_same_v<N, Bf16>;
  static constexpr int kK = kShape.k, kV = kShape.v, kRows = kShape.rows(), kKeys = kShape.keys;
  static constexpr int kStages = kShape.stages;
  // Steps of which a warpgroup sees nothing in code of their own: of 128 rows there are few, and no registers.
  static constexpr bool kIdles = kRows == 64;
  // dQ of a warpgroup: half the columns of 64 rows, or half of 128 rows.
  static constexpr int kOwn = kRows == 64 ? kK / 2 : kK;

  const BackwardCall& call;
  const BackwardShared<kWidth> shared;
  const int group;  // of warps
  float dk[kK / 2], dv[kV / 2];
  int at = 0;  // stage, and buffer of dS
  unsigned parity = 0;
  // Where the lane added last. It moves from tile to tile: a place made anew for each would have its registers taken by
  // what comes next, which then waits until the additions are sent.
  float* dq_at;
  int dq_tile = 0;

  __device__ __forceinline__ BackwardMath(const BackwardCall& c, const BackwardShared<kWidth>& sh, int g)
      : call(c),
        shared(sh),
        group(g),
        dq_at(c.dq_sums + group * (64 * kOwn) + static_cast<int>(threadIdx.x % 128) * 4) {}

  __device__ __forceinline__ int first_key() const { return group * 64 + first_key_of_lane(); }  // and 8 behind

  // Sums [64 keys][rows]: keys' rows of K or V times those of Q or dO.
  template <int kColumns>
  __device__ __forceinline__ void multiply_rows(float (&sums)[kRows / 2], unsigned keys, unsigned rows) const {
    const unsigned a = tile_at(keys + static_cast<unsigned>(group) * 8192), b = tile_at(rows);
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i)
      product<kBf16>(sums, moved(a, static_cast<unsigned>(i / 4 * kKeys * 128 + i % 4 * 32)),
                     moved(b, static_cast<unsigned>(i / 4 * kRows * 128 + i % 4 * 32)), i > 0);
    products_commit();
  }
  // Sums [64 keys][columns] += of[keys][rows] · rows.
  template <int kColumns>
  __device__ __forceinline__ void add_rows(float (&sums)[kColumns / 2], const unsigned (&of)[kRows / 4],
                                           unsigned rows) {
    const unsigned b = tile_at<kRows * 128>(rows);
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      const unsigned a[4] = {of[4 * i], of[4 * i + 1], of[4 * i + 2], of[4 * i + 3]};
      product<kBf16>(sums, a, moved(b, static_cast<unsigned>(i * 2048)), true);
    }
  }
  __device__ __forceinline__ void multiply_dq(float (&sums)[kOwn / 2], int buffer) const {
    const unsigned box = static_cast<unsigned>(group) * (kKeys * 128);
    const unsigned a = tile_at(shared.ds(buffer) + (kRows == 64 ? 0u : box));
    const unsigned b = tile_at<kKeys * 128>(shared.k() + (kRows == 64 ? kOwn / 64 * box : 0u));
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
      product_columns<kBf16>(sums, moved(a, static_cast<unsigned>(i * 2048)), moved(b, static_cast<unsigned>(i * 2048)),
                             i > 0);
    products_commit();
  }

  using Ahead = StatisticsAhead<kBent ? 0 : 4>;
  __device__ __forceinline__ void make_shares(float (&s)[kRows / 2], unsigned (&p)[kRows / 4], int flags, int stage,
                                              const Ahead& lse) const {
    plain_shares<N>(call, s, p, lse, {flags, shared.step(stage), first_key(), 0});
  }
  __device__ __forceinline__ void make_bent_shares(float (&s)[kRows / 2], unsigned (&p)[kRows / 4], int flags, int stage,
                                                   const Ahead& lse) const {
    bent_shares<N>(call, s, p, lse, {flags, shared.step(stage), first_key(), 0});
  }
  __device__ __forceinline__ void make_ds(unsigned (&ds)[kRows / 4], const float (&p)[kRows / 2],
                                          const float (&dp)[kRows / 2], const Ahead& delta) const {
    score_gradients<N>(call, ds, p, dp, delta);
  }
  // dS^T to shared memory, [key][row].
  __device__ __forceinline__ void keep_ds(const unsigned (&ds)[kRows / 4], int buffer) const {
    keep_rows<kRows, kKeys>(ds, shared.ds(buffer), group * 64, 0);
  }
  __device__ __forceinline__ void add_dq(const float (&x)[kOwn / 2], int tile) {
    dq_at += static_cast<Index>(tile - dq_tile) * (kRows * kK);
    dq_tile = tile;
#pragma unroll
    for (int j = 0; j < kOwn / 8; ++j) {
      const float four[4] = {x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]};
      add_four(dq_at + j * 512, four);
    }
  }
  // The same to who adds it: of the step before `at`.
  __device__ __forceinline__ void hand_dq(const float (&x)[kOwn / 2]) const {
    static_assert(64 * kOwn * 4 == BackwardShape::kPartBytes && BackwardShape::kParts == 2);
    wait(shared.part_free(group, at ^ 1), parity ^ static_cast<unsigned>(at));
    const unsigned to = shared.part(group, at ^ 1) + threadIdx.x % 128 * 16;
#pragma unroll
    for (int j = 0; j < kOwn / 8; ++j)
      asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};\n" ::"r"(to + static_cast<unsigned>(j * 2048)), "f"(x[4 * j]),
                   "f"(x[4 * j + 1]), "f"(x[4 * j + 2]), "f"(x[4 * j + 3])
                   : "memory");
    stores_visible();
    __syncwarp();
    if (arrives()) arrive(shared.part_full(group, at ^ 1));
  }

  __device__ __forceinline__ void give_dq(const float (&x)[kOwn / 2], int tile) {
    if constexpr (kDq == Dq::in_turn)
      hand_dq(x);
    else
      add_dq(x, tile);
  }

  __device__ __forceinline__ void await_turn() const { named_sync(1 + group, 256); }
  __device__ __forceinline__ void pass_turn() const { named_arrive(2 - group, 256); }

  __device__ __forceinline__ void run() {
    if (group == 1) named_arrive(1, 256);  // the first one's turn
    for (unsigned keys_parity = 0;; keys_parity ^= 1) {
      wait(shared.keys_full(), keys_parity);
      const int flags = SharedItem::read(shared.item()).flags;
      if (SharedItem::read(shared.item()).begin < 0) {
        if constexpr (kDq == Dq::in_turn) {  // who adds is done too, but not before it has seen the part before
          wait(shared.part_free(group, at), parity ^ 1);
          if (arrives()) arrive(shared.part_full(group, at));
        }
        return;
      }
#pragma unroll
      for (int i = 0; i < kK / 2; ++i) dk[i] = 0;
#pragma unroll
      for (int i = 0; i < kV / 2; ++i) dv[i] = 0;
      if ((flags & SharedItem::kUsed) != 0) attend();
      const SharedItem item = SharedItem::read(shared.item());
      __syncwarp();
      if (arrives()) arrive(shared.keys_free());  // the next ones come while these are written
      store_both(item);
    }
  }
  __device__ __forceinline__ void store_both(const SharedItem& item) const {
    const int live = live_keys(call, item, first_key());
    store_keys<N>(call, call.dk, call.wide_dk, dk, item, first_key(), live);
    store_keys<N>(call, call.dv, call.wide_dv, dv, item, first_key(), live);
  }
  // What a step leaves to the next.
  struct Late {
    int tile = -1;      // of dQ, which the next step multiplies and adds
    bool read = false;  // dS of the step before has been read
  };
  // All rows of an item.
  __device__ __forceinline__ void attend() {
    static_assert(kStages == 2 && BackwardShape::kDsBuffers == 2);
    Late late;
    int flags = 0;
    do {
      if (kIdles && (flags & RowStep::kNextIdle << group) != 0)
        flags = idle_step(late);
      else
        flags = step(late);
      if (at == 1) parity ^= 1;
      at ^= 1;
    } while ((flags & RowStep::kLast) == 0);
    settle(dk);
    settle(dv);
    if constexpr (kMakesDq) {
      float dq[kOwn / 2];
      await_turn();
      products_begin();
      multiply_dq(dq, at ^ 1);
      pass_turn();
      products_wait<0>();
      settle(dq);
      if (arrives()) {
        if (late.read) arrive(shared.ds_free(at));
        arrive(shared.ds_free(at ^ 1));
      }
      give_dq(dq, late.tile);
    }
  }
  __device__ __forceinline__ int step(Late& late) {
    float s[kRows / 2], dp[kRows / 2];
    unsigned p[kRows / 4], g[kRows / 4];
    wait(shared.q_full(at), parity);
    wait(shared.dout_full(at), parity);
    await_turn();
    products_begin();
    multiply_rows<kK>(s, shared.k(), shared.q(at));
    multiply_rows<kV>(dp, shared.v(), shared.dout(at));
    pass_turn();
    const int flags = read_word(shared.step(at));
    const Ahead lse(shared.lse(at));
    products_wait<1>();
    settle(s);
    // Said here, not where it is known: there the register of its place would wait for the additions that go out.
    if (kMakesDq && late.read && arrives()) arrive(shared.ds_free(at));
    if constexpr (kBent)
      make_bent_shares(s, p, flags, at, lse);
    else
      make_shares(s, p, flags, at, lse);
    const Ahead delta(shared.delta(at));
    products_wait<0>();
    settle(dp);
    make_ds(g, s, dp, delta);
    if constexpr (kMakesDq) {
      wait(shared.ds_free(at), parity ^ 1);
      keep_ds(g, at);
      stores_visible();
    }
    float dq[kOwn / 2];
    await_turn();
    settle(p);
    settle(g);
    products_begin();
    add_rows<kV>(dv, p, shared.dout(at));
    add_rows<kK>(dk, g, shared.q(at));
    products_commit();
    if constexpr (kMakesDq) multiply_dq(dq, at ^ 1);  // of the first step: of nothing, for nothing
    pass_turn();
    const int sums = kDq == Dq::any_order ? read_sums(shared.step(at)) : 0;
    products_wait<kMakesDq ? 1 : 0>();
    release_rows();
    if constexpr (kMakesDq) finish_dq(dq, sums, late);
    return flags;
  }
  // Of rows that see none of the warpgroup's keys: zeros for dQ, and its part of dQ of the last step.
  __device__ __forceinline__ int idle_step(Late& late) {
    wait(shared.q_full(at), parity);
    wait(shared.dout_full(at), parity);
    await_turn();
    pass_turn();
    const int flags = read_word(shared.step(at));
    const int sums = kDq == Dq::any_order ? read_sums(shared.step(at)) : 0;
    float dq[kOwn / 2];
    if constexpr (kMakesDq) {
      if (late.read && arrives()) arrive(shared.ds_free(at));
      wait(shared.ds_free(at), parity ^ 1);
      const unsigned none[kRows / 4] = {};
      keep_ds(none, at);
      stores_visible();
    }
    await_turn();
    if constexpr (kMakesDq) {
      products_begin();
      multiply_dq(dq, at ^ 1);
    }
    pass_turn();
    release_rows();
    if constexpr (kMakesDq) finish_dq(dq, sums, late);
    return flags;
  }
  __device__ __forceinline__ void release_rows() const {
    if (!arrives()) return;
    arrive(shared.q_free(at));
    arrive(shared.dout_free(at));
  }
  __device__ __forceinline__ void finish_dq(float (&dq)[kOwn / 2], int sums, Late& late) {
    products_wait<0>();
    settle(dq);
    late.read = late.tile >= 0;
    if (late.read) give_dq(dq, late.tile);
    late.tile = sums;
  }
};

template <class N, Width kWidth, bool kBent, Dq kDq>
__global__ void __launch_bounds__(BackwardShape::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  const BackwardShared<kWidth> shared = begin_block<kWidth, kDq>(memory);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), group = warp / 4;
  if (group == 0) {
    serve<kWidth, kDq>(call, shared, warp);
  } else {
    take_registers<BackwardShape::kMathRegisters>();
    BackwardMath<N, kWidth, kBent, kDq>(call, shared, group - 1).run();
  }
#else
  __trap();  // compiled for another GPU: the registry does not come here
#endif
}

template <class N, Width kWidth, bool kBent>
void launch_backward(const BackwardCall& call, cudaStream_t stream) {
  constexpr BackwardShape kShape = backward_shape(kWidth);
  static_assert(kShape.shared_bytes_in_turn() <= 227 * 1024);
  const bool in_turn = call.additions != nullptr;
  const auto kernel = in_turn                   ? &backward_kernel<N, kWidth, kBent, Dq::in_turn>
                      : call.dq_sums != nullptr ? &backward_kernel<N, kWidth, kBent, Dq::any_order>
                                                : &backward_kernel<N, kWidth, kBent, Dq::elsewhere>;
  launch(kernel,
         {dim3(static_cast<unsigned>(min(max(call.keys.active, call.unseen_tiles) * call.heads_k, call.processors))),
          dim3(BackwardShape::kThreads),
          static_cast<std::size_t>(in_turn ? kShape.shared_bytes_in_turn() : kShape.shared_bytes()), call.early},
         stream, call);
}

template <class N>
void launch_any(Width width, const BackwardCall& call, cudaStream_t stream) {
  if (width == Width::w64)
    launch_backward<N, Width::w64, false>(call, stream);
  else if (call.scores.bend == 0)
    launch_backward<N, Width::w128, false>(call, stream);
  else
    launch_backward<N, Width::w128, true>(call, stream);
}

}  // namespace weft::cuda::sm90
