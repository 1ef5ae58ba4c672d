// Whole tensors, sharded over ranks that are threads, attended by a schedule and brought together again.
#pragma once

#include <algorithm>
#include <array>
#include <mutex>
#include <random>

#include "check/device_mirror.h"
#include "check/tensors.h"
#include "index.h"
#include "rank_tensors.h"
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
inline constexpr std::array<check::Tensor RanksResult::*, 7> kResults = {
    &RanksResult::out, &RanksResult::lse, &RanksResult::max_logit, &RanksResult::dq,
    &RanksResult::dk,  &RanksResult::dv,  &RanksResult::dsink};

inline bool same_bytes(const RanksResult& a, const RanksResult& b) {
  return std::all_of(kResults.begin(), kResults.end(),
                     [&](const auto tensor) { return (a.*tensor).bytes == (b.*tensor).bytes; });
}

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

inline RankSizes sizes_of(const RanksProblem& p, const Layouts& layouts) {
  return {layouts.q.rows(), layouts.k.rows(), p.heads_q, p.heads_k, p.dim_qk, p.dim_v, p.dtype};
}

// A rank's rows of the inputs.
inline void shard(const Layouts& layouts, Index rank, RanksInput& in, RankTensors<>& to) {
  for (auto [layout, whole, local] : {std::tuple{&layouts.q, &in.q, &to.q},
                                      {&layouts.k, &in.k, &to.k},
                                      {&layouts.k, &in.v, &to.v},
                                      {&layouts.q, &in.dout, &to.dout}}) {
    std::fill(local->bytes.begin(), local->bytes.end(), in.unused);
    layout->shard(rank, whole->rows(), local->rows());
  }
}

// One rank's forward and backward; its rows of the results go to `r`, which ranks that are threads share.
inline void run_one_rank(Communicator& comm, const RanksProblem& p, RanksInput& in, const Layouts& layouts,
                         const ScheduleOptions& options, const ExecutorOptions& how, RanksResult& r,
                         std::mutex& mutex) {
  const Index rank = comm.rank();
  RankTensors<> t(sizes_of(p, layouts));
  shard(layouts, rank, in, t);
  ExecutorOptions mine = how;
  mine.place = check::place_of(how.kernel);
  Executor executor(comm, make_schedule(p.problem, layouts, rank, {p.heads_q, p.heads_k}, options), mine);
  check::DeviceMirror mirror(mine.place);
  RankArgs args = t.args(mirror, attention_of(p, in));
  args.forward.max_logit = mirror.out(t.max_logit.view);
  if (p.sink) args.backward.dsink = mirror.out(t.dsink.view);
  mirror.send();
  comm.set_node(uses(options, "node") ? options.node : 1);
  comm.reset_traffic();
  executor.forward(args.forward);
  r.forward[at(rank)] = comm.traffic();
  comm.reset_traffic();
  executor.backward(args.backward);
  r.backward[at(rank)] = comm.traffic();
  mirror.fetch();
  const std::lock_guard lock(mutex);
  for (auto [layout, local, whole] : {std::tuple{&layouts.q, &t.out, &r.out},
                                      {&layouts.q, &t.lse, &r.lse},
                                      {&layouts.q, &t.dq, &r.dq},
                                      {&layouts.k, &t.dk, &r.dk},
                                      {&layouts.k, &t.dv, &r.dv}})
    layout->unshard(rank, local->rows(), whole->rows());
  for (auto [local, whole] : {std::pair{&t.max_logit, &r.max_logit}, {&t.dsink, &r.dsink}})
    std::copy(local->bytes.begin(), local->bytes.end(), whole->bytes.begin());
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
