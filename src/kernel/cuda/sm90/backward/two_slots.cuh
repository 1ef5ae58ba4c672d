// A step of the backward with two turns at issuing products: S and dP; then dV, dK and dQ of the last step. While one
// warpgroup multiplies, the other one makes P and dS. The turns also say that the other's dS is there.
#pragma once

#include "kernel/cuda/sm90/backward/products.cuh"

namespace weft::cuda::sm90 {

template <class N, Width kWidth, bool kBent, Dq kDq>
struct TwoTurns : BackwardProducts<N, kWidth, kDq> {
  using Base = BackwardProducts<N, kWidth, kDq>;
  using Base::await_turn, Base::keep_ds, Base::multiply_dq, Base::multiply_last_dq, Base::next_buffer, Base::pass_turn;
  using Base::Base, Base::kK, Base::kV, Base::kRows, Base::kOwn;
  using Base::call, Base::shared, Base::group, Base::dk, Base::dv, Base::at, Base::parity;
  static constexpr bool kMakesDq = kDq != Dq::elsewhere;
  static_assert(kDq != Dq::any_order);  // that has one turn, or three warpgroups
  // Rows of the next step are awaited before dQ leaves: 2 % faster.
  static constexpr bool kAsksAhead = kDq == Dq::in_turn;
  // A stage of rows, a buffer of dS and a part of dQ have one number.
  static_assert(Base::kShape.stages == 2 && Base::kShape.ds_buffers() == 2 && Base::kShape.parts() == 2);
  using Ahead = StatisticsAhead<kBent ? 0 : 4>;

  __device__ __forceinline__ void run() {
    this->each_item([&] { attend(); },
                    [&] {
                      // Who adds is done too, but not before it has seen the part before.
                      if constexpr (kDq == Dq::in_turn) {
                        wait(shared.part_free(group, at), parity ^ 1);
                        if (arrives()) arrive(shared.part_full(group, at));
                      }
                    });
  }

  // dQ of the step before `at`.
  __device__ __forceinline__ void give_dq(const float (&x)[kOwn / 2]) {
    wait(shared.part_free(group, at ^ 1), parity ^ static_cast<unsigned>(at));
    this->hand_dq(x, at ^ 1);
  }

  // What a step leaves to the next.
  struct Late {
    bool begun = false;  // there is dQ that the next step multiplies
    bool read = false;   // dS of the step before has been read
  };
  __device__ __forceinline__ void await_rows(int stage, unsigned of) const {
    wait(shared.q_full(stage), of);
    wait(shared.dout_full(stage), of);
  }
  __device__ __forceinline__ void await_next(int flags) const {
    if (kAsksAhead && (flags & RowStep::kLast) == 0) await_rows(at ^ 1, parity ^ static_cast<unsigned>(at));
  }
  // All rows of an item.
  __device__ __forceinline__ void attend() {
    Late late;
    int flags = 0;
    if constexpr (kAsksAhead) await_rows(at, parity);
    do {
      if ((flags & RowStep::kNextIdle << group) != 0)
        flags = idle_step(late);
      else
        flags = step(late);
      next_buffer();
    } while ((flags & RowStep::kLast) == 0);
    settle(dk);
    settle(dv);
    if constexpr (kMakesDq) {
      float dq[kOwn / 2];
      multiply_last_dq(dq);
      if (arrives()) {
        if (late.read) arrive(shared.ds_free(at));
        arrive(shared.ds_free(at ^ 1));
      }
      give_dq(dq);
    }
  }
  __device__ __forceinline__ int step(Late& late) {
    float s[kRows / 2], dp[kRows / 2];
    unsigned p[kRows / 4], g[kRows / 4];
    if constexpr (!kAsksAhead) await_rows(at, parity);
    await_turn();
    products_begin();
    this->template multiply_rows<kK>(s, shared.k(), shared.q(at));
    this->template multiply_rows<kV>(dp, shared.v(), shared.dout(at));
    pass_turn();
    const int flags = read_word(shared.step(at));
    Ahead lse(shared.lse(at));
    products_wait<1>();
    settle(s);
    // Said here, not where it is known: there the register of its place would wait for the additions that go out.
    if (kMakesDq && late.read && arrives()) arrive(shared.ds_free(at));
    if constexpr (kBent)
      bent_shares<N>(call, s, p, lse, this->place(flags, at));
    else
      plain_shares<N>(call, s, p, lse, this->place(flags, at));
    Ahead delta(shared.delta(at));
    products_wait<0>();
    settle(dp);
    score_gradients<N>(call, g, s, dp, delta);
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
    this->template add_rows<kV>(dv, p, shared.dout(at));
    this->template add_rows<kK>(dk, g, shared.q(at));
    products_commit();
    if constexpr (kMakesDq) multiply_dq(dq, at ^ 1);  // of the first step: of nothing, for nothing
    pass_turn();
    await_next(flags);
    products_wait<kMakesDq ? 1 : 0>();
    release_rows();
    if constexpr (kMakesDq) finish_dq(dq, late);
    return flags;
  }
  // Of rows that see none of the warpgroup's keys: zeros for dQ, and its part of dQ of the last step.
  __device__ __forceinline__ int idle_step(Late& late) {
    if constexpr (!kAsksAhead) await_rows(at, parity);
    await_turn();
    pass_turn();
    const int flags = read_word(shared.step(at));
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
    await_next(flags);
    release_rows();
    if constexpr (kMakesDq) finish_dq(dq, late);
    return flags;
  }
  __device__ __forceinline__ void release_rows() const {
    if (!arrives()) return;
    arrive(shared.q_free(at));
    arrive(shared.dout_free(at));
  }
  __device__ __forceinline__ void finish_dq(float (&dq)[kOwn / 2], Late& late) {
    products_wait<0>();
    settle(dq);
    late.read = late.begun;
    if (late.read) give_dq(dq);
    late.begun = true;
  }
};

}  // namespace weft::cuda::sm90
