// Whole tensors, sharded over ranks that are threads, attended by a schedule and brought together again.
#pragma once

#include <algorithm>
#include <mutex>
#include <random>

#include "check/device_mirror.h"
#include "check/tensors.h"
#include "index.h"
#include "weft/communicator.h"
#include "weft/executor.h"
#include "weft/schedule.h"

namespace weft::test {

struct RanksProblem {
  Problem problem;
  Index heads_q = 2, heads_k = 1, dim_qk = 16, dim_v = 16;
  DType dtype = DType::f32;
  std::optional<double> scale = {};
  double softcap = 0;
  bool sink = false;
  unsigned seed = 1;
};

// Gradients are of the problem's dtype too, so that what is rounded once shows.
struct RanksResult {
  check::Tensor out, lse, max_logit, dq, dk, dv, dsink;
  std::vector<Traffic> forward, backward;  // by rank
};

struct RanksInput {
  explicit RanksInput(const RanksProblem& p) : RanksInput(p, std::mt19937_64(p.seed)) {}

  check::Tensor q, k, v, dout;
  std::vector<float> sink;
  std::byte unused{0xff};  // what ranks' rows without a token are full of: NaN

 private:
  RanksInput(const RanksProblem& p, std::mt19937_64 engine)
      : q(make(p, engine, p.problem.packing().q(), p.heads_q, p.dim_qk)),
        k(make(p, engine, p.problem.packing().k(), p.heads_k, p.dim_qk)),
        v(make(p, engine, p.problem.packing().k(), p.heads_k, p.dim_v)),
        dout(make(p, engine, p.problem.packing().q(), p.heads_q, p.dim_v)) {
    for (Index h = 0; h < p.heads_q; ++h) sink.push_back(static_cast<float>(check::normal(engine)));
  }
  static check::Tensor make(const RanksProblem& p, std::mt19937_64& engine, const Stream& stream, Index heads,
                            Index dim) {
    std::vector<bool> real(at(stream.tokens()), false);
    for (Index i = 0; i < stream.sequences(); ++i) std::fill_n(real.begin() + stream.offset(i), stream.used(i), true);
    return check::random_tensor(engine, p.dtype, stream.tokens(), heads, dim, [&](Index t) { return real[at(t)]; });
  }
};

inline Attention attention_of(const RanksProblem& p, const RanksInput& in) {
  Attention a{.scale = p.scale, .softcap = p.softcap};
  if (p.sink) a.sink = Sink::learnable(per_head(in.sink.data(), DType::f32, p.heads_q));
  return a;
}

// Room for whole results; what no rank writes stays 0.
inline RanksResult empty_result(const RanksProblem& p, Index ranks) {
  using check::Tensor;
  const Index tq = p.problem.packing().q().tokens(), tk = p.problem.packing().k().tokens();
  return {Tensor(p.dtype, tq, p.heads_q, p.dim_v),  Tensor(DType::f32, tq, p.heads_q, 1),
          Tensor(DType::f32, 1, p.heads_q, 1),      Tensor(p.dtype, tq, p.heads_q, p.dim_qk),
          Tensor(p.dtype, tk, p.heads_k, p.dim_qk), Tensor(p.dtype, tk, p.heads_k, p.dim_v),
          Tensor(DType::f32, 1, p.heads_q, 1),      std::vector<Traffic>(at(ranks)),
          std::vector<Traffic>(at(ranks))};
}

// One rank's forward and backward; its rows of the results go to `r`, which ranks that are threads share.
inline void run_one_rank(Communicator& comm, const RanksProblem& p, RanksInput& in, const Layouts& layouts,
                         const ScheduleOptions& options, const ExecutorOptions& how, RanksResult& r,
                         std::mutex& mutex) {
  using check::Tensor;
  const Index rank = comm.rank(), rows = layouts.q.rows(), keys = layouts.k.rows();
  Tensor q(p.dtype, rows, p.heads_q, p.dim_qk), k(p.dtype, keys, p.heads_k, p.dim_qk),
      v(p.dtype, keys, p.heads_k, p.dim_v), dout(p.dtype, rows, p.heads_q, p.dim_v);
  for (auto [layout, whole, local] : {std::tuple{&layouts.q, &in.q, &q},
                                      {&layouts.k, &in.k, &k},
                                      {&layouts.k, &in.v, &v},
                                      {&layouts.q, &in.dout, &dout}}) {
    std::fill(local->bytes.begin(), local->bytes.end(), in.unused);
    layout->shard(rank, whole->rows(), local->rows());
  }
  Tensor out(p.dtype, rows, p.heads_q, p.dim_v), lse(DType::f32, rows, p.heads_q, 1),
      max_logit(DType::f32, 1, p.heads_q, 1), dq(p.dtype, rows, p.heads_q, p.dim_qk),
      dk(p.dtype, keys, p.heads_k, p.dim_qk), dv(p.dtype, keys, p.heads_k, p.dim_v), dsink(DType::f32, 1, p.heads_q, 1);
  ExecutorOptions mine = how;
  mine.place = check::place_of(how.kernel);
  Executor executor(comm, make_schedule(p.problem, layouts, rank, {p.heads_q, p.heads_k}, options), mine);
  check::DeviceMirror mirror(mine.place);
  const ExecutorForwardArgs forward{.q = mirror.in(q.view),
                                    .k = mirror.in(k.view),
                                    .v = mirror.in(v.view),
                                    .attention = mirror.in(attention_of(p, in)),
                                    .out = mirror.out(out.view),
                                    .lse = mirror.out(lse.view),
                                    .max_logit = mirror.out(max_logit.view),
                                    .place = mine.place};
  const ExecutorBackwardArgs backward{.q = forward.q,
                                      .k = forward.k,
                                      .v = forward.v,
                                      .attention = forward.attention,
                                      .dout = mirror.in(dout.view),
                                      .out = forward.out,
                                      .lse = forward.lse,
                                      .dq = mirror.out(dq.view),
                                      .dk = mirror.out(dk.view),
                                      .dv = mirror.out(dv.view),
                                      .dsink = p.sink ? mirror.out(dsink.view) : TensorView{},
                                      .place = mine.place};
  mirror.send();
  comm.reset_traffic();
  executor.forward(forward);
  r.forward[at(rank)] = comm.traffic();
  comm.reset_traffic();
  executor.backward(backward);
  r.backward[at(rank)] = comm.traffic();
  mirror.fetch();
  const std::lock_guard lock(mutex);
  for (auto [layout, local, whole] : {std::tuple{&layouts.q, &out, &r.out},
                                      {&layouts.q, &lse, &r.lse},
                                      {&layouts.q, &dq, &r.dq},
                                      {&layouts.k, &dk, &r.dk},
                                      {&layouts.k, &dv, &r.dv}})
    layout->unshard(rank, local->rows(), whole->rows());
  r.max_logit.bytes = max_logit.bytes;
  r.max_logit.view.data = r.max_logit.bytes.data();
  r.dsink.bytes = dsink.bytes;
  r.dsink.view.data = r.dsink.bytes.data();
}

inline RanksResult run_on_ranks(const RanksProblem& p, RanksInput& in, const Layouts& layouts,
                                const ScheduleOptions& options, const ExecutorOptions& how = {},
                                const ThreadRanks& world = {}) {
  RanksResult r = empty_result(p, layouts.q.ranks());
  std::mutex mutex;
  run_ranks(
      layouts.q.ranks(), [&](Communicator& comm) { run_one_rank(comm, p, in, layouts, options, how, r, mutex); },
      world);
  return r;
}

}  // namespace weft::test
