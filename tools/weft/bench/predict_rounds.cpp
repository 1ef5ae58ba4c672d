#include "bench/predict_rounds.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "bench/clock.h"
#include "calibrate/calibrate.h"
#include "calibrate/reference.h"
#include "index.h"

namespace weft::tool {
namespace {

// Of one candidate in one round, over all ranks.
struct Span {
  std::array<double, 2> begin = {1e300, 1e300}, end = {0, 0};  // forward, backward
  double references = 0;                                       // of all cores
  Index cores = 0;

  double reference() const { return references / static_cast<double>(cores); }
  Measured scaled(double usual_reference) const {
    const double slower = reference() / usual_reference;
    return {(end[0] - begin[0]) / slower, (end[1] - begin[1]) / slower};
  }
};

// All go on at once, which sleepers that are woken one after another do not: ranks look again and again, and let others
// on their core look meanwhile.
class StartTogether {
 public:
  explicit StartTogether(Index ranks) : ranks_(ranks) {}
  void wait() {
    const Index turn = turn_.load();
    if (++arrived_ == ranks_) {
      arrived_ = 0;
      ++turn_;
    }
    while (turn_.load() == turn && !over_.load()) std::this_thread::yield();
  }
  void give_up() { over_ = true; }  // a rank will not come again: nobody waits any more

 private:
  const Index ranks_;
  std::atomic<Index> arrived_ = 0, turn_ = 0;
  std::atomic<bool> over_ = false;
};

}  // namespace

MeasuredCandidates measure_in_turn(const check::Case& c, const Problem& problem,
                                   const std::vector<Candidate>& candidates, const ThreadRanks& world, Index rounds) {
  // Not by messages, which would let ranks go at different moments on slow links.
  std::barrier barrier(static_cast<std::ptrdiff_t>(c.ranks));
  StartTogether start_together(c.ranks);
  std::mutex mutex;
  std::vector<std::vector<Span>> spans(candidates.size(), std::vector<Span>(at(rounds)));
  const auto rank = [&](Communicator& comm) {
    stay_on_core(comm.rank(), comm.ranks());
    std::vector<std::unique_ptr<Executor>> executors;
    for (const Candidate& candidate : candidates)
      executors.push_back(std::make_unique<Executor>(
          comm, make_schedule(problem, *candidate.layouts, comm.rank(), {c.heads_q, c.heads_k}, candidate.options),
          ExecutorOptions{.kernel = "cpu"}));
    const bool first_on_core = comm.rank() % ranks_a_core(c.ranks) == 0;
    std::optional<ReferenceCalls> calls;
    if (first_on_core) calls.emplace(c.dtype, c.dim_qk);
    for (Index round = -1; round < rounds; ++round)
      for (std::size_t n = 0; n < candidates.size(); ++n) {
        barrier.arrive_and_wait();
        const double reference = calls ? calls->seconds() : 0;
        for (std::size_t which = 0; which < 2; ++which) {
          Operands& operands = *(*candidates[n].tensors)[at(comm.rank())];
          barrier.arrive_and_wait();
          start_together.wait();
          const double start = seconds_now();
          operands.run(*executors[n], which == 0 ? Pass::forward : Pass::backward);
          const double stop = seconds_now();
          if (round < 0) continue;
          const std::lock_guard lock(mutex);
          Span& span = spans[n][at(round)];
          span.begin[which] = std::min(span.begin[which], start);
          span.end[which] = std::max(span.end[which], stop);
          if (which == 0 && first_on_core) span.references += reference, ++span.cores;
        }
      }
  };
  const auto guarded = [&](Communicator& comm) {
    try {
      rank(comm);
    } catch (...) {
      barrier.arrive_and_drop();  // the others go on to where they notice
      start_together.give_up();
      throw;
    }
  };
  run_ranks(c.ranks, guarded, world);
  std::vector<double> references;
  for (const std::vector<Span>& each : spans)
    for (const Span& span : each) references.push_back(span.reference());
  MeasuredCandidates measured{.reference = median(std::move(references)), .rounds = {}};
  for (const std::vector<Span>& each : spans) {
    std::vector<Measured>& rounds_of = measured.rounds.emplace_back();
    for (const Span& span : each) rounds_of.push_back(span.scaled(measured.reference));
  }
  return measured;
}

}  // namespace weft::tool
