#include "bench/schedule_runs.h"

#include <algorithm>
#include <chrono>
#include <mutex>

#include "index.h"

namespace weft::tool {
namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

// Bytes that the rank receives for the first step that moves any. The swap of the first head group counts both ways:
// compute overlaps neither its way in nor the last one's way back.
Index first_bytes(const Schedule& s, const TensorShape& shape) {
  const auto moves = [](const Step& step) { return step.move.has_value(); };
  const auto first = std::find_if(s.steps.begin(), s.steps.end(), moves);
  Schedule only = s;
  only.steps.clear();
  if (s.swap)
    only.swap->head_groups.resize(1);
  else if (first != s.steps.end())
    only.steps.push_back(*first);
  return traffic(only, shape, Pass::forward).bytes_received;
}

}  // namespace

RankOperands rank_operands(const check::Case& c, const Layouts& layouts) {
  RankOperands ranks;
  for (Index r = 0; r < layouts.q.ranks(); ++r)
    ranks.push_back(std::make_unique<Operands>(c, layouts.q.rows(), layouts.k.rows(), true, at(r)));
  return ranks;
}

ScheduleRun run_schedule(const check::Case& c, const Problem& problem, const Layouts& layouts,
                         const RankOperands& tensors, const ScheduleTask& task, Pass pass, const std::string& kernel,
                         const ThreadRanks& world, Trace* trace) {
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
        tensors[at(comm.rank())]->run(executor, pass);
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
