// What one rank gives to an executor and gets from it.
#pragma once

#include <random>
#include <vector>

#include "check/device_mirror.h"
#include "check/tensors.h"
#include "weft/executor.h"

namespace weft::test {

struct RankSizes {
  Index rows = 0, keys = 0, heads_q = 0, heads_k = 0, dim_qk = 0, dim_v = 0;
  DType dtype = DType::f32;
};

struct RankArgs {
  ExecutorForwardArgs forward;
  ExecutorBackwardArgs backward;
};

template <class Held = check::Tensor>
struct RankTensors {
  explicit RankTensors(const RankSizes& s)
      : q(s.dtype, s.rows, s.heads_q, s.dim_qk),
        k(s.dtype, s.keys, s.heads_k, s.dim_qk),
        v(s.dtype, s.keys, s.heads_k, s.dim_v),
        dout(s.dtype, s.rows, s.heads_q, s.dim_v),
        out(s.dtype, s.rows, s.heads_q, s.dim_v),
        lse(DType::f32, s.rows, s.heads_q, 1),
        max_logit(DType::f32, 1, s.heads_q, 1),
        dq(s.dtype, s.rows, s.heads_q, s.dim_qk),
        dk(s.dtype, s.keys, s.heads_k, s.dim_qk),
        dv(s.dtype, s.keys, s.heads_k, s.dim_v),
        dsink(DType::f32, 1, s.heads_q, 1) {}
  // Random inputs.
  RankTensors(const RankSizes& s, unsigned seed) : RankTensors(s) {
    std::mt19937_64 engine(seed);
    for (const Held* t : {&q, &k, &v, &dout}) {
      std::vector<double> values(at(t->view.rows * t->view.heads * t->view.dim));
      for (double& x : values) x = check::normal(engine);
      from_f64(values, t->view);
    }
  }
  RankTensors(Index rows, Index heads, Index dim, unsigned seed, DType dtype = DType::f32)
      : RankTensors({rows, rows, heads, heads, dim, dim, dtype}, seed) {}

  // Of both passes, without max_logit and dsink.
  RankArgs args(check::DeviceMirror& mirror, const Attention& attention = {}) const {
    RankArgs a{{.q = mirror.in(q.view),
                .k = mirror.in(k.view),
                .v = mirror.in(v.view),
                .attention = mirror.in(attention),
                .out = mirror.out(out.view),
                .lse = mirror.out(lse.view),
                .place = mirror.place()},
               {.dout = mirror.in(dout.view),
                .dq = mirror.out(dq.view),
                .dk = mirror.out(dk.view),
                .dv = mirror.out(dv.view),
                .place = mirror.place()}};
    a.backward.q = a.forward.q;
    a.backward.k = a.forward.k;
    a.backward.v = a.forward.v;
    a.backward.attention = a.forward.attention;
    a.backward.out = a.forward.out;
    a.backward.lse = a.forward.lse;
    return a;
  }
  RankArgs args() const {
    check::DeviceMirror here({});
    return args(here);
  }
  void run(Executor& executor) const {
    const RankArgs both = args();
    executor.forward(both.forward);
    executor.backward(both.backward);
  }

  Held q, k, v, dout, out, lse, max_logit, dq, dk, dv, dsink;
};

}  // namespace weft::test
