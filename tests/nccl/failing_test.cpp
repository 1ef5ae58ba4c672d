// Ranks over NCCL, one of which dies, is stopped or names other sizes: every other rank ends with an Error that names
// it.
#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>

#include <unistd.h>

#include "nccl/gpu_ranks.h"
#include "said.h"

namespace weft::test {
namespace {

enum class Harm { dies, stops, other_sizes };
constexpr std::array kHarms{"dies", "is stopped", "names other sizes"};
constexpr Index kFloats = 1 << 16;  // of a message

struct Plan {
  Harm harm;
  Index victim;
  int round;
  std::chrono::microseconds delay;  // after the round has begun

  std::string text() const {
    return "rank " + std::to_string(victim) + " " + kHarms[static_cast<std::size_t>(harm)] + " in round " +
           std::to_string(round) + " + " + std::to_string(delay.count()) + " us";
  }
};

// Rounds of messages around a ring until a rank fails, which every other rank must learn.
void until_failure(Communicator& c, OnGpu& gpu, const Plan& plan) {
  const auto on = c.on(gpu.place);
  float *from = gpu.put(values(kFloats, 1, c.rank())), *to = gpu.put(std::vector<float>(kFloats));
  const Index ranks = c.ranks();
  std::jthread signal;
  for (int round = 0;; ++round) {
    std::snprintf(at_work, sizeof at_work, "rank %d in round %d", static_cast<int>(c.rank()), round);
    const bool now = c.rank() == plan.victim && round == plan.round;
    if (now && plan.harm != Harm::other_sizes)
      signal = std::jthread([&] {
        std::this_thread::sleep_for(plan.delay);
        ::kill(::getpid(), plan.harm == Harm::dies ? SIGKILL : SIGSTOP);
      });
    const Index count = now && plan.harm == Harm::other_sizes ? kFloats / 2 : kFloats;
    on->send_receive((c.rank() + 1) % ranks, floats(from, count), (c.rank() + ranks - 1) % ranks, floats(to, count))
        .wait();
    device::synchronize(gpu.place);
    c.check();
  }
}

// All ranks but the harmed one must end with an Error that names it; after other sizes a new connection must work.
void check_plan(Index ranks, const Plan& plan) {
  const Said said(ranks);
  const std::string error = error_of([&] {
    run(ranks,
        [&](Communicator& c, OnGpu& gpu) {
          try {
            until_failure(c, gpu, plan);
          } catch (const Error& e) {
            said.put(c.rank(), e.what());
            if (plan.harm != Harm::other_sizes) throw;
          }
          std::snprintf(at_work, sizeof at_work, "rank %d with a new connection", static_cast<int>(c.rank()));
          check_collectives(c, gpu);
        },
        {.time_limit = 3, .grace = 5});
  });
  const std::string name = "rank " + std::to_string(plan.victim);
  for (Index r = 0; r < ranks; ++r) {
    if (r == plan.victim) continue;
    SCOPED_TRACE("rank " + std::to_string(r));
    if (plan.harm == Harm::dies) expect_parts(said.of(r), {name + " has failed or died while rank "});
    if (plan.harm == Harm::stops) expect_parts(said.of(r), {name + ", which has given no sign of life for "});
    if (plan.harm == Harm::other_sizes)
      expect_parts(said.of(r), {name, std::to_string(kFloats * 4), std::to_string(kFloats * 2), "different problems"});
  }
  if (plan.harm == Harm::dies) expect_parts(error, {name + ": was ended by signal 9"});
  if (plan.harm == Harm::stops) expect_parts(error, {name + ", which has given no sign of life for "});
  if (plan.harm == Harm::other_sizes) {
    EXPECT_EQ(error, "");
  }
}

class NcclFailures : public NcclRanks {};
INSTANTIATE_TEST_SUITE_P(Failing, NcclFailures, testing::Values(2, 4, 8));

// WEFT_FAILURES: so many plans, WEFT_SEED: others.
TEST_P(NcclFailures, TheRankThatFailsIsNamed) {
  const auto number = [](const char* name, int otherwise) {
    const char* given = std::getenv(name);
    return given == nullptr ? otherwise : std::atoi(given);
  };
  const int count = number("WEFT_FAILURES", 3);
  std::mt19937_64 random(static_cast<std::uint64_t>(number("WEFT_SEED", 11)));
  int right = 0;
  double longest = 0;
  for (int i = 0; i < count; ++i) {
    const auto victim = static_cast<Index>(random() % static_cast<std::uint64_t>(GetParam()));
    const auto round = static_cast<int>(random() % 20);
    const Plan plan{static_cast<Harm>(i % 3), victim, round, std::chrono::microseconds(random() % 20'000)};
    std::printf("%d: %s of %d: ", i, plan.text().c_str(), static_cast<int>(GetParam()));
    std::fflush(stdout);  // a hang must show what hung
    SCOPED_TRACE(plan.text());
    const int before = failed_parts();
    const auto begin = std::chrono::steady_clock::now();
    check_plan(GetParam(), plan);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const bool wrong = failed_parts() > before;
    longest = std::max(longest, seconds);
    std::printf("%s, %.1f s\n", wrong ? "WRONG" : "named by all", seconds);
    if (!wrong) ++right;
  }
  std::printf("%d of %d failures named by all other ranks, the longest after %.1f s\n", right, count, longest);
}

}  // namespace
}  // namespace weft::test
