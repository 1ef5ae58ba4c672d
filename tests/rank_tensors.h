// What one rank gives to an executor and gets from it: f32, as many K/V heads as query heads, rows of the rank alone.
#pragma once

#include "kernel/attention_problem.h"
#include "weft/executor.h"
#include "weft/tensor.h"

namespace weft::test {

template <class Held>
struct RankTensors {
  RankTensors(Index rows, Index heads, Index dim, unsigned seed)
      : q(DType::f32, rows, heads, dim),
        k(DType::f32, rows, heads, dim),
        v(DType::f32, rows, heads, dim),
        dout(DType::f32, rows, heads, dim),
        out(DType::f32, rows, heads, dim),
        lse(DType::f32, rows, heads, 1),
        dq(DType::f32, rows, heads, dim),
        dk(DType::f32, rows, heads, dim),
        dv(DType::f32, rows, heads, dim) {
    Random random(seed);
    for (const Held* t : {&q, &k, &v, &dout}) from_f64(random.values(rows * heads * dim), t->view);
  }

  void run(Executor& executor) const {
    executor.forward({.q = q.view, .k = k.view, .v = v.view, .out = out.view, .lse = lse.view});
    executor.backward({.q = q.view,
                       .k = k.view,
                       .v = v.view,
                       .dout = dout.view,
                       .out = out.view,
                       .lse = lse.view,
                       .dq = dq.view,
                       .dk = dk.view,
                       .dv = dv.view});
  }

  Held q, k, v, dout, out, lse, dq, dk, dv;
};

}  // namespace weft::test
