// The bf16 tensors of one rank, random where they are inputs, and their copies on its GPU.
#pragma once

#include <random>

#include "ranks.h"

namespace weft::test {

struct StepSizes {
  Index rows = 0, heads_q = 0, heads_k = 0, dim_qk = 0, dim_v = 0;
};

struct RankStep {
  RankStep(const StepSizes& s, const Place& place, Index rank)
      : q(random(s, s.heads_q, s.dim_qk, rank, 1)),
        k(random(s, s.heads_k, s.dim_qk, rank, 2)),
        v(random(s, s.heads_k, s.dim_v, rank, 3)),
        dout(random(s, s.heads_q, s.dim_v, rank, 4)),
        out(DType::bf16, s.rows, s.heads_q, s.dim_v),
        lse(DType::f32, s.rows, s.heads_q, 1),
        max_logit(DType::f32, 1, s.heads_q, 1),
        dq(DType::bf16, s.rows, s.heads_q, s.dim_qk),
        dk(DType::bf16, s.rows, s.heads_k, s.dim_qk),
        dv(DType::bf16, s.rows, s.heads_k, s.dim_v),
        mirror(place),
        forward{.q = mirror.in(q.view),
                .k = mirror.in(k.view),
                .v = mirror.in(v.view),
                .out = mirror.out(out.view),
                .lse = mirror.out(lse.view),
                .max_logit = mirror.out(max_logit.view),
                .place = place},
        backward{.q = forward.q,
                 .k = forward.k,
                 .v = forward.v,
                 .dout = mirror.in(dout.view),
                 .out = forward.out,
                 .lse = forward.lse,
                 .dq = mirror.out(dq.view),
                 .dk = mirror.out(dk.view),
                 .dv = mirror.out(dv.view),
                 .place = place} {
    mirror.send();
  }

  check::Tensor q, k, v, dout, out, lse, max_logit, dq, dk, dv;
  check::DeviceMirror mirror;
  ExecutorForwardArgs forward;
  ExecutorBackwardArgs backward;

 private:
  static check::Tensor random(const StepSizes& s, Index heads, Index dim, Index rank, unsigned which) {
    std::mt19937_64 engine(static_cast<unsigned>(rank) * 10 + which);
    return check::random_tensor(engine, DType::bf16, s.rows, heads, dim, [](Index) { return true; });
  }
};

// All ranks have come here.
inline void meet(Communicator& comm) {
  float token = 0;
  comm.all_reduce(&token, DType::f32, 1, Reduce::sum).wait();
}

}  // namespace weft::test
