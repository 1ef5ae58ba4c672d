// Executors on ranks that are processes, one of which dies, is stopped or is given another problem at a random moment:
// every other rank ends with an Error within the time limit, the failed rank is named, and no process is left.
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ranks.h"
#include "refusal.h"
#include "said.h"
#include "weft/processes.h"

namespace weft::test {
namespace {

constexpr Index kProcesses = 4;
constexpr double kSeconds = 2;

RanksProblem problem_of(std::vector<Index> lengths) {
  return {.problem = Problem(Stream::from_lengths(lengths).padded_to(8), {.causal = true}), .heads_q = 4, .heads_k = 4};
}

enum class Harm { dies, stops, other_problem };

// Forwards and backwards until a rank fails.
void attend(Communicator& c, ScheduleKind kind, Harm harm, bool is_victim, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto moment = std::chrono::microseconds(random() % 60'000);
  std::jthread signal;
  if (is_victim && harm != Harm::other_problem)
    signal = std::jthread([=] {
      std::this_thread::sleep_for(moment);
      ::kill(::getpid(), harm == Harm::dies ? SIGKILL : SIGSTOP);
    });
  const auto wrong_from = static_cast<int>(random() % 8);
  for (int round = 0;; ++round) {
    const bool wrong = is_victim && harm == Harm::other_problem && round >= wrong_from;
    const RanksProblem p = problem_of(wrong ? std::vector<Index>{40, 6, 18} : std::vector<Index>{37, 5, 22});
    RanksInput in(p);
    const Layouts layouts = make_layouts(LayoutKind::zigzag, p.problem, kProcesses);
    RanksResult result = empty_result(p, kProcesses);
    std::mutex mutex;
    run_one_rank(c, p, in, layouts, {.kind = kind}, {.checked = harm == Harm::other_problem}, result, mutex);
  }
}

// WEFT_FAILURES: how many ranks are harmed.
TEST(FailingRanks, EveryOtherRankEndsAndTheFailedOneIsNamed) {
  const char* given = std::getenv("WEFT_FAILURES");
  const int failures = given == nullptr ? 6 : std::atoi(given);
  const auto kinds = schedule_kinds();
  std::mt19937_64 random(3);
  for (int i = 0; i < failures; ++i) {
    const auto harm = static_cast<Harm>(i % 3);
    const auto victim = static_cast<Index>(random() % kProcesses);
    const ScheduleKind kind = kinds[random() % kinds.size()];
    const std::uint64_t seed = random();
    const std::string rank = "rank " + std::to_string(victim);
    SCOPED_TRACE(std::string(name(kind)) + ", harm " + std::to_string(i % 3) + " to " + rank);
    const Said said(kProcesses);
    const auto begin = std::chrono::steady_clock::now();
    const std::string error = error_of([&] {
      run_processes(kProcesses,
                    [&](Communicator& c) {
                      try {
                        attend(c, kind, harm, c.rank() == victim, seed);
                      } catch (const Error& e) {
                        said.put(c.rank(), e.what());
                        throw;
                      }
                    },
                    {.time_limit = kSeconds, .grace = 2});
    });
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));  // the machine may be busy
    for (Index r = 0; r < kProcesses; ++r) {
      if (r != victim) {
        EXPECT_NE(said.of(r), "") << "rank " << r << " did not end with an Error";
      }
    }
    if (harm == Harm::dies) expect_parts(error, {rank + ": was ended by signal 9"});
    if (harm == Harm::stops) {
      expect_parts(error, {"waited 2 seconds", "last calls: #", " of "});
      std::string all;
      for (Index r = 0; r < kProcesses; ++r) all += said.of(r);
      expect_parts(all, {"for " + rank});
    }
    if (harm == Harm::other_problem) expect_parts(error, {"packing: " + rank + " differs"});
    EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1) << "a process was left";
  }
}

TEST(FlightRecord, NamesThePassesAndStepsOfAnExecutor) {
  const RanksProblem p = problem_of({37, 5, 22});
  RanksInput in(p);
  const Layouts layouts = make_layouts(LayoutKind::zigzag, p.problem, kProcesses);
  RanksResult result = empty_result(p, kProcesses);
  std::mutex mutex;
  run_ranks(kProcesses, [&](Communicator& c) {
    run_one_rank(c, p, in, layouts, {.kind = ScheduleKind::ring}, {}, result, mutex);
    expect_parts(c.flight_record(),
                 {" of forward step 1, ", " of forward step 2, ", " exchange of forward, 96 bytes to ",
                  " of backward step 1, ", " of backward step 2, ", "done after"});
    std::vector<float> one(1);
    c.all_reduce(one.data(), DType::f32, 1, Reduce::sum).wait();
    const std::string record = c.flight_record();
    EXPECT_NE(record.rfind(" exchange, 12 bytes to "), std::string::npos) << record;  // of no pass
  });
}

}  // namespace
}  // namespace weft::test
