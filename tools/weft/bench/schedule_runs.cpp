#include "bench/schedule_runs.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <random>

#include "index.h"

namespace weft::tool {
namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

// Bytes that the rank receives for the first step that moves any. A swap of heads counts both ways: compute overlaps
// neither.
Index first_bytes(const Schedule& s, const TensorShape& shape) {
  const auto moves = [](const Step& step) { return step.move.has_value(); };
  const auto first = std::find_if(s.steps.begin(), s.steps.end(), moves);
  Schedule only = s;
  only.steps.clear();
  if (!s.swap && first != s.steps.end()) only.steps.push_back(*first);
  return traffic(only, shape, Pass::forward).bytes_received;
}

}  // namespace

RankTensors::RankTensors(const check::Case& c, const Layouts& layouts) : sink(at(c.heads_q), 0.5F) {
  attention.scale = c.scale;
  attention.softcap = c.softcap;
  if (c.sink == check::Case::SinkKind::off_by_one) attention.sink = Sink::off_by_one();
  if (c.sink == check::Case::SinkKind::learnable)
    attention.sink = Sink::learnable(per_head(static_cast<const float*>(sink.data()), DType::f32, c.heads_q));
  const Index rows = layouts.q.rows(), keys = layouts.k.rows();
  std::mt19937_64 engine(c.seed);
  const auto all = [](Index) { return true; };
  for (Index r = 0; r < layouts.q.ranks(); ++r) {
    const auto make = [&](Index n, Index heads, Index dim) {
      return check::random_tensor(engine, c.dtype, n, heads, dim, all);
    };
    const auto empty = [&](DType dtype, Index n, Index heads, Index dim) {
      return check::Tensor(dtype, n, heads, dim);
    };
    ranks.push_back(std::make_unique<Rank>(
        Rank{make(rows, c.heads_q, c.dim_qk), make(keys, c.heads_k, c.dim_qk), make(keys, c.heads_k, c.dim_v),
             make(rows, c.heads_q, c.dim_v), empty(c.dtype, rows, c.heads_q, c.dim_v),
             empty(DType::f32, rows, c.heads_q, 1), empty(c.dtype, rows, c.heads_q, c.dim_qk),
             empty(c.dtype, keys, c.heads_k, c.dim_qk), empty(c.dtype, keys, c.heads_k, c.dim_v)}));
  }
}

void RankTensors::run(Executor& executor, Index rank, Pass pass) {
  Rank& t = *ranks[at(rank)];
  if (pass == Pass::forward)
    executor.forward(
        {.q = t.q.view, .k = t.k.view, .v = t.v.view, .attention = attention, .out = t.out.view, .lse = t.lse.view});
  else
    executor.backward({.q = t.q.view,
                       .k = t.k.view,
                       .v = t.v.view,
                       .attention = attention,
                       .dout = t.dout.view,
                       .out = t.out.view,
                       .lse = t.lse.view,
                       .dq = t.dq.view,
                       .dk = t.dk.view,
                       .dv = t.dv.view});
}

ScheduleRun run_schedule(const check::Case& c, const Problem& problem, const Layouts& layouts, RankTensors& tensors,
                         const ScheduleTask& task, Pass pass, const std::string& kernel, const ThreadRanks& world,
                         Trace* trace) {
  ScheduleRun run;
  std::mutex mutex;
  Clock::time_point first = Clock::time_point::max(), last = Clock::time_point::min();
  run_ranks(
      layouts.q.ranks(),
      [&](Communicator& comm) {
        double waiting = 0;
        const auto traced =
            trace != nullptr ? trace->observer(comm.rank(), task.name) : std::function<void(const StepEvent&)>();
        Executor executor(comm, make_schedule(problem, layouts, comm.rank(), {c.heads_q, c.heads_k}, task.options),
                          {.kernel = kernel, .observer = [&](const StepEvent& e) {
                             if (e.kind != StepEvent::Kind::compute) waiting += e.end - e.begin;
                             if (traced) traced(e);
                           }});
        float token = 0;  // all start together
        comm.all_reduce(&token, DType::f32, 1, Reduce::sum).wait();
        comm.reset_traffic();
        const Clock::time_point begin = Clock::now();
        tensors.run(executor, comm.rank(), pass);
        const Clock::time_point end = Clock::now();
        const TensorShape shape{.dtype = c.dtype, .dim_qk = c.dim_qk, .dim_v = c.dim_v};
        const Index bytes = first_bytes(executor.schedule(), shape);
        const std::lock_guard lock(mutex);
        first = std::min(first, begin);
        last = std::max(last, end);
        run.waiting = std::max(run.waiting, waiting);
        if (comm.traffic().bytes_received >= run.traffic.bytes_received) {
          run.traffic = comm.traffic();
          run.first_bytes = bytes;
        }
        run.workspace_bytes = std::max(run.workspace_bytes, executor.workspace_bytes());
      },
      world);
  run.seconds = seconds(last - first);
  return run;
}

}  // namespace weft::tool
