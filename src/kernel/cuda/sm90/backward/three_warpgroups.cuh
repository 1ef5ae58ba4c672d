// A step of the backward with three warpgroups, which nothing keeps in step but buffers: dV and dK of a step and S of
// the next one are issued together, dP of the next one when dV and dK are there. Two of the three make P and dS while
// one multiplies. dQ of a step is made by one of them from what all three left, a step late: of a step in buffer b by
// b.
#pragma once

#include "kernel/cuda/sm90/backward/products.cuh"

namespace weft::cuda::sm90 {

template <class N, Width kWidth, Dq kDq>
struct ThreeGroups : BackwardProducts<N, kWidth, kDq> {
  using Base = BackwardProducts<N, kWidth, kDq>;
  using Base::call, Base::shared, Base::group, Base::keys, Base::dk, Base::dv;
  using Base::kK, Base::kV, Base::kRows, Base::kOwn;
  using Statistics = StatisticsInTurn<2, kRows / 16>;
  static constexpr int kStages = Base::kShape.stages;
  static constexpr bool kMakesDq = kDq != Dq::elsewhere;
  static_assert(Base::kShape.ds_buffers() == 3 && kOwn == kRows);

  // Of the step whose P and dS are made next: its rows, and its buffer of dS.
  Ring<kStages> rows;
  Ring<3> ds;
  unsigned own_parity = 0;              // of the buffer whose dQ this one makes
  unsigned p[kRows / 4], g[kRows / 4];  // P and dS of a step, rounded

  __device__ __forceinline__ ThreeGroups(const BackwardCall& c, const BackwardShared<kWidth, kDq>& sh, int g)
      : Base(c, sh, g) {}
  __device__ __forceinline__ void run() {
    this->each_item([&] { attend(); },
                    [&] {
                      // Who adds is done too, but not before it has seen the part before.
                      if constexpr (kDq == Dq::in_turn) {
                        wait(shared.part_free(group, 0), own_parity ^ 1);
                        if (arrives()) arrive(shared.part_full(group, 0));
                      }
                    });
  }

  __device__ __forceinline__ void attend() {
    int before = -1, sums;  // tiles of dQ: of the last step, of this one
    int flags = begin(sums);
    while ((flags & RowStep::kLast) == 0) flags = step(before, sums);
    end(before, sums);
  }
  // P and dS of the first step.
  __device__ __forceinline__ int begin(int& sums) {
    float s[kRows / 2], dp[kRows / 2];
    int flags;
    Statistics known = this->template multiply_first<Statistics>(s, dp, rows, flags, sums);
    make_shares(s, dp, known, flags);
    return flags;
  }
  // dV and dK of a step, P and dS of the next.
  __device__ __forceinline__ int step(int& before, int& sums) {
    const int last = rows.at;
    rows.next();
    float s[kRows / 2], dp[kRows / 2];
    make_dq_before(s, before);
    settle(p);
    settle(g);
    products_begin();
    const int flags = read_word(shared.step(rows.at)), next_sums = read_sums(shared.step(rows.at));
    Statistics known(shared.lse(rows.at), shared.delta(rows.at));
    add_both(last);
    this->template multiply_rows<kK>(s, shared.k(keys.at), shared.q(rows.at));
    products_wait<1>();
    release(last);
    products_begin();
    this->template multiply_rows<kV>(dp, shared.v(keys.at), shared.dout(rows.at));
    before = sums;
    sums = next_sums;
    ds.next();
    make_shares(s, dp, known, flags);
    return flags;
  }
  // dV and dK of the last step, and the dQ that is left.
  __device__ __forceinline__ void end(int before, int sums) {
    float dq[kOwn / 2];
    make_dq_before(dq, before);
    settle(p);
    settle(g);
    products_begin();
    add_both(rows.at);
    products_wait<0>();
    settle(dk);
    settle(dv);
    release(rows.at);
    rows.next();
    ds.next();
    make_dq_before(dq, sums);
  }

  __device__ __forceinline__ void add_both(int stage) {
    this->template add_rows<kV>(dv, p, shared.dout(stage));
    this->template add_rows<kK>(dk, g, shared.q(stage));
    products_commit();
  }
  // dQ of the step before that in buffer ds.at, if there was one and it is this one's to make. In the registers of S:
  // with its own the assembler finds that there are too few.
  __device__ __forceinline__ void make_dq_before(float (&dq)[kOwn / 2], int tile) {
    if constexpr (kMakesDq) {
      if (tile < 0 || (ds.at == 0 ? 2 : ds.at - 1) != group) return;
      wait(shared.ds_full(group), own_parity);
      stores_visible();  // of all three, who do not wait for it
      products_begin();
      this->multiply_dq(dq, group);
      products_wait<0>();
      settle(dq);
      if (arrives()) arrive(shared.ds_free(group));
      if constexpr (kDq == Dq::in_turn) {
        wait(shared.part_free(group, 0), own_parity ^ 1);
        this->hand_dq(dq, 0);
      } else {
        this->add_dq(dq, tile);
      }
      own_parity ^= 1;
    }
  }
  // P, rounded, and dS, to shared memory too, of the step whose S and dP are the last products under way. P is rounded
  // late: before, there are no registers for both.
  __device__ __forceinline__ void make_shares(float (&s)[kRows / 2], float (&dp)[kRows / 2], Statistics& known,
                                              int flags) {
    products_wait<1>();
    settle(s);
    plain_shares(call, s, known, this->place(flags, rows.at));
    this->await_after(rows, flags);
    products_wait<0>();
    settle(dp);
    score_gradients<N>(call, g, s, dp, known);
    if constexpr (kMakesDq) {
      wait(shared.ds_free(ds.at), ds.parity ^ 1);
      this->keep_ds(g, ds.at);
    }
    round_pairs<N>(p, s);
    if constexpr (kMakesDq) {
      __syncwarp();
      if (arrives()) arrive(shared.ds_full(ds.at));
    }
  }
  __device__ __forceinline__ void release(int stage) const {
    if (!arrives()) return;
    arrive(shared.q_free(stage));
    arrive(shared.dout_free(stage));
  }
};

}  // namespace weft::cuda::sm90
