// What all ways through a step of the backward share (backward_one_turn.cuh, backward_two_turns.cuh,
// backward_three_groups.cuh): a warpgroup's 64 keys, its products, and where their results go.
#pragma once

#include "kernel/cuda/sm90/backward/probabilities.cuh"
#include "kernel/cuda/sm90/backward/producer.cuh"
#include "kernel/cuda/sm90/backward/store.cuh"
#include "kernel/cuda/sm90/ptx/wgmma.cuh"

namespace weft::cuda::sm90 {

template <class N, Width kWidth, Dq kDq>
struct BackwardProducts {
  static constexpr BackwardShape kShape = backward_shape(kWidth, kDq);
  static constexpr bool kBf16 = std::is_same_v<N, Bf16>;
  static constexpr int kK = kShape.k, kV = kShape.v, kRows = kShape.rows(), kKeys = kShape.keys;
  static constexpr int kOwn = kK / kShape.parts_of_tile();  // columns of dQ that a warpgroup makes

  const BackwardCall& call;
  const BackwardShared<kWidth, kDq> shared;
  const int group;  // of warps
  float dk[kK / 2], dv[kV / 2];
  Ring<kShape.key_buffers> keys;
  int at = 0;  // buffer of dS
  unsigned parity = 0;
  // Where the lane added last. It moves from tile to tile: a place made anew for each would have its registers taken by
  // what comes next, which then waits until the additions are sent.
  float* dq_at;
  int dq_tile = 0;

  __device__ __forceinline__ BackwardProducts(const BackwardCall& c, const BackwardShared<kWidth, kDq>& sh, int g)
      : call(c),
        shared(sh),
        group(g),
        dq_at(c.dq_sums + (kOwn == kK ? 0 : group * (64 * kOwn)) + static_cast<int>(threadIdx.x % 128) * 4) {}

  __device__ __forceinline__ int first_key() const { return group * 64 + first_key_of_lane(); }  // and 8 behind
  __device__ __forceinline__ StepPlace place(int flags, int stage) const {
    return {flags, shared.step(stage), first_key(), 0};
  }
  __device__ __forceinline__ void next_buffer() {
    if (at == 1) parity ^= 1;
    at ^= 1;
  }

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
    const unsigned a = tile_at(shared.ds(buffer));
    const unsigned box = kOwn == kK ? 0u : static_cast<unsigned>(group) * (kKeys * 128);
    const unsigned b = tile_at<kKeys * 128>(shared.k(keys.at) + box);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
      product_columns<kBf16>(sums, moved(a, static_cast<unsigned>(i * 2048)), moved(b, static_cast<unsigned>(i * 2048)),
                             i > 0);
    products_commit();
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

  // dQ to who adds it, and makes it visible to its copy.
  __device__ __forceinline__ void hand_dq(const float (&x)[kOwn / 2], int part) const {
    static_assert(64 * kOwn * 4 == BackwardShape::kPartBytes);
    const unsigned to = shared.part(group, part) + threadIdx.x % 128 * 16;
#pragma unroll
    for (int j = 0; j < kOwn / 8; ++j)
      asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};\n" ::"r"(to + static_cast<unsigned>(j * 2048)), "f"(x[4 * j]),
                   "f"(x[4 * j + 1]), "f"(x[4 * j + 2]), "f"(x[4 * j + 3])
                   : "memory");
    __syncwarp();
    if (arrives()) arrive(shared.part_full(group, part));
  }

  // A step's rows; those of the next one, if this is not the last.
  template <int kStages>
  __device__ __forceinline__ void await_rows(const Ring<kStages>& of) const {
    wait(shared.q_full(of.at), of.parity);
    wait(shared.dout_full(of.at), of.parity);
  }
  template <int kStages>
  __device__ __forceinline__ void await_after(const Ring<kStages>& rows, int flags) const {
    if ((flags & RowStep::kLast) != 0) return;
    Ring<kStages> next = rows;
    next.next();
    await_rows(next);
  }

  // S and dP of an item's first step; what is known of it.
  template <class Statistics, int kStages>
  __device__ __forceinline__ Statistics multiply_first(float (&s)[kRows / 2], float (&dp)[kRows / 2],
                                                       const Ring<kStages>& rows, int& flags, int& sums) const {
    await_rows(rows);
    flags = read_word(shared.step(rows.at));
    sums = read_sums(shared.step(rows.at));
    Statistics known(shared.lse(rows.at), shared.delta(rows.at));
    products_begin();
    multiply_rows<kK>(s, shared.k(keys.at), shared.q(rows.at));
    multiply_rows<kV>(dp, shared.v(keys.at), shared.dout(rows.at));
    return known;
  }

  // Of two warpgroups.
  __device__ __forceinline__ void await_turn() const { named_sync(1 + group, 256); }
  __device__ __forceinline__ void pass_turn() const { named_arrive(2 - group, 256); }

  // dQ of the last step, with nothing beside it: when the other one's dS is there.
  __device__ __forceinline__ void multiply_last_dq(float (&dq)[kOwn / 2]) const {
    await_turn();
    products_begin();
    multiply_dq(dq, at ^ 1);
    pass_turn();
    products_wait<0>();
    settle(dq);
  }

  __device__ __forceinline__ void store_both(const SharedItem& item) const {
    const int live = live_keys(call, item, first_key());
    store_keys<N>(call, call.dk, call.wide_dk, dk, item, first_key(), live);
    store_keys<N>(call, call.dv, call.wide_dv, dv, item, first_key(), live);
  }
  // All items. `attend` passes an item's rows, `end` is for who waits for more.
  template <class Attend, class End>
  __device__ __forceinline__ void each_item(const Attend& attend, const End& end) {
    if (kShape.groups == 2 && group == 1) named_arrive(1, 256);  // the first one's turn
    for (;; keys.next()) {
      wait(shared.keys_full(keys.at), keys.parity);
      const int flags = SharedItem::read(shared.item(keys.at)).flags;
      if (SharedItem::read(shared.item(keys.at)).begin < 0) return end();
#pragma unroll
      for (int i = 0; i < kK / 2; ++i) dk[i] = 0;
#pragma unroll
      for (int i = 0; i < kV / 2; ++i) dv[i] = 0;
      if ((flags & SharedItem::kUsed) != 0) attend();
      const SharedItem item = SharedItem::read(shared.item(keys.at));
      __syncwarp();
      if (arrives()) arrive(shared.keys_free(keys.at));  // the next ones come while these are written
      store_both(item);
    }
  }
};

}  // namespace weft::cuda::sm90
