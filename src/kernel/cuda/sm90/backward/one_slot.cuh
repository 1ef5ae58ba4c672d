// A step of the backward with one turn at issuing products: dQ of the last step, dV and dK of this one, S of the next
// one. When dV and dK are there the other warpgroup may begin, and dP of the next step is issued beside it. P and dS of
// that step are made while the other one multiplies; the turns also say that the other's dS is there.
//
// dK is multiplied by dS in shared memory, where it lies for dQ anyway: in registers there is no room for it beside S.
#pragma once

#include "kernel/cuda/sm90/backward/products.cuh"

namespace weft::cuda::sm90 {

template <class N, Width kWidth, bool kBent, Dq kDq>
struct OneTurn : BackwardProducts<N, kWidth, kDq> {
  using Base = BackwardProducts<N, kWidth, kDq>;
  using Base::add_dq, Base::await_turn, Base::keep_ds, Base::multiply_dq, Base::multiply_last_dq, Base::next_buffer,
      Base::pass_turn;
  using Base::call, Base::shared, Base::group, Base::dk, Base::dv, Base::at, Base::parity;
  using Base::kBf16, Base::kK, Base::kV, Base::kRows, Base::kKeys, Base::kOwn;
  using Statistics = StatisticsInTurn<4, kRows / 16>;
  static constexpr int kStages = Base::kShape.stages;
  static_assert(kStages == 3 && kDq == Dq::any_order);

  Ring<kStages> rows;  // of the step whose P and dS are made next

  __device__ __forceinline__ OneTurn(const BackwardCall& c, const BackwardShared<kWidth, kDq>& sh, int g)
      : Base(c, sh, g) {}
  __device__ __forceinline__ void run() {
    this->each_item([&] { attend(); }, [] {});
  }

  __device__ __forceinline__ void attend() {
    const SharedItem item = SharedItem::read(shared.item());
    if (item.end - item.begin <= 64 * group) return attend_idly();
    unsigned p[kRows / 4];
    int before = -1, sums;  // tiles of dQ: of the last step, of this one
    int flags = begin(p, sums);
    while ((flags & RowStep::kLast) == 0) flags = step(p, before, sums);
    end(p, before, sums);
  }
  // P and dS of the first step.
  __device__ __forceinline__ int begin(unsigned (&p)[kRows / 4], int& sums) {
    float s[kRows / 2], dp[kRows / 2];
    int flags;
    Statistics known = this->template multiply_first<Statistics>(s, dp, rows, flags, sums);
    make_shares(s, p, dp, known, flags);
    return flags;
  }
  // Products of a step, P and dS of the next.
  __device__ __forceinline__ int step(unsigned (&p)[kRows / 4], int& before, int& sums) {
    const Ring<kStages> last = rows;
    rows.next();
    float s[kRows / 2], dp[kRows / 2], dq[kOwn / 2];
    await_turn();
    settle(p);
    products_begin();
    const int flags = read_word(shared.step(rows.at));
    Statistics known(shared.lse(rows.at), shared.delta(rows.at));
    multiply_dq(dq, at ^ 1);  // of the first step: of nothing, for nothing
    add_both(p, last.at);
    this->template multiply_rows<kK>(s, shared.k(), shared.q(rows.at));
    products_wait<2>();
    settle(dq);
    if (before >= 0) add_dq(dq, before);
    products_wait<1>();
    pass_turn();
    products_begin();
    this->template multiply_rows<kV>(dp, shared.v(), shared.dout(rows.at));
    release(last.at, before >= 0);
    before = sums;
    sums = read_sums(shared.step(rows.at));
    next_buffer();
    make_shares(s, p, dp, known, flags);
    return flags;
  }
  // Products of the last step.
  __device__ __forceinline__ void end(unsigned (&p)[kRows / 4], int before, int sums) {
    float dq[kOwn / 2];
    await_turn();
    settle(p);
    products_begin();
    multiply_dq(dq, at ^ 1);
    add_both(p, rows.at);
    pass_turn();
    products_wait<0>();
    settle(dq);
    settle(dk);
    settle(dv);
    end_dq(dq, before, sums);
  }
  // dQ of the last step but one is there; that of the last one.
  __device__ __forceinline__ void end_dq(float (&dq)[kOwn / 2], int before, int sums) {
    release(rows.at, before >= 0);
    if (before >= 0) add_dq(dq, before);
    next_buffer();
    rows.next();
    multiply_last_dq(dq);
    if (arrives()) arrive(shared.ds_free(at ^ 1));
    add_dq(dq, sums);
  }

  // Of an item that has no keys for this warpgroup: zeros for dQ, and its part of it. The other one has all turns but
  // for that.
  __device__ __forceinline__ void attend_idly() {
    this->await_rows(rows);
    int before = -1, sums = read_sums(shared.step(rows.at)), flags = read_word(shared.step(rows.at));
    keep_zeros(flags);
    float dq[kOwn / 2];
    while ((flags & RowStep::kLast) == 0) {
      const int last = rows.at;
      rows.next();
      multiply_last_dq(dq);
      release(last, before >= 0);
      if (before >= 0) add_dq(dq, before);
      before = sums;
      sums = read_sums(shared.step(rows.at));
      flags = read_word(shared.step(rows.at));
      next_buffer();
      keep_zeros(flags);
    }
    multiply_last_dq(dq);
    end_dq(dq, before, sums);
  }
  __device__ __forceinline__ void keep_zeros(int flags) const {
    this->await_after(rows, flags);
    wait(shared.ds_free(at), parity ^ 1);
    const unsigned none[kRows / 4] = {};
    keep_ds(none, at);
    stores_visible();
  }

  __device__ __forceinline__ void add_both(const unsigned (&p)[kRows / 4], int stage) {
    this->template add_rows<kV>(dv, p, shared.dout(stage));
    const unsigned a = tile_at(shared.ds(at) + static_cast<unsigned>(group) * 8192),
                   b = tile_at<kRows * 128>(shared.q(stage));
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i)
      product_right_columns<kBf16>(dk, moved(a, static_cast<unsigned>(i / 4 * kKeys * 128 + i % 4 * 32)),
                                   moved(b, static_cast<unsigned>(i * 2048)), true);
    products_commit();
  }
  // P, rounded, and dS, to shared memory, of the step whose S and dP are the last products under way.
  __device__ __forceinline__ void make_shares(float (&s)[kRows / 2], unsigned (&p)[kRows / 4], float (&dp)[kRows / 2],
                                              Statistics& known, int flags) const {
    products_wait<1>();
    settle(s);
    if constexpr (kBent)
      bent_shares<N>(call, s, p, known, this->place(flags, rows.at));
    else
      plain_shares<N>(call, s, p, known, this->place(flags, rows.at));
    // Here, where other products are awaited anyway: in its turn a warpgroup would wait for the barrier's answer.
    this->await_after(rows, flags);
    products_wait<0>();
    settle(dp);
    unsigned ds[kRows / 4];
    score_gradients<N>(call, ds, s, dp, known);
    wait(shared.ds_free(at), parity ^ 1);
    keep_ds(ds, at);
    stores_visible();
  }
  // A step's rows, and dS of the one before it if there was one.
  __device__ __forceinline__ void release(int stage, bool had_before) const {
    if (!arrives()) return;
    if (had_before) arrive(shared.ds_free(at ^ 1));
    arrive(shared.q_free(stage));
    arrive(shared.dout_free(stage));
  }
};

}  // namespace weft::cuda::sm90
