// Weft's NCCL communicator between processes that share one GPU, or have one each: each says that it is a host of its
// own (NCCL_HOSTID), so NCCL takes sockets between them. CUDA is used after the fork only. A failed expectation in a
// rank becomes its failure. Schedules, layouts, masks and dtypes over NCCL: weft verify --comm processes.
#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <execinfo.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/faulty.h"
#include "comm/letters.h"
#include "device/device.h"
#include "disagreements.h"
#include "nccl/on_gpu.h"
#include "ranks.h"
#include "refusal.h"
#include "said.h"
#include "weft/executor.h"
#include "weft/kernel.h"
#include "weft/processes.h"

namespace weft::test {
namespace {

Block floats(float* data, Index count) { return {.data = data, .rows = 1, .bytes = count * Index{sizeof(float)}}; }

// What a rank is at, for the alarm.
char at_work[100] = "starts";

// A rank that hangs says where and ends, which the test sees as its failure.
void hung(int) {
  const auto write = [](const char* text) {
    if (::write(STDERR_FILENO, text, std::strlen(text)) < 0) std::_Exit(98);
  };
  write("a rank hung: ");
  write(at_work);
  write("\n");
  void* stack[60];
  ::backtrace_symbols_fd(stack, ::backtrace(stack, 60), STDERR_FILENO);
  std::_Exit(99);
}

void set_alarm(unsigned seconds) {
  void* once[1];
  ::backtrace(once, 1);  // loads what it needs, which a signal handler must not
  std::signal(SIGALRM, hung);
  ::alarm(seconds);
}

int failed_parts() { return testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count(); }

void run(Index ranks, const std::function<void(Communicator&, OnGpu&)>& body, const ProcessRanks& how = {30, 10}) {
  const int before = failed_parts();  // of the test so far, which ranks inherit
  run_processes(
      ranks,
      [&](Communicator& c) {
        set_alarm(static_cast<unsigned>(how.time_limit) + 30);
        std::snprintf(at_work, sizeof at_work, "rank %d", static_cast<int>(c.rank()));
        ::setenv("NCCL_HOSTID", std::to_string(c.rank()).c_str(), 1);
        OnGpu gpu(c);
        body(c, gpu);
        if (failed_parts() > before) throw std::runtime_error("an expectation failed, see above");
      },
      how);
}

// all_gather and reduce_scatter of NCCL against what they must give, where blocks are contiguous and where they are
// not.
void check_collectives(Communicator& c, OnGpu& gpu) {
  const std::unique_ptr<DeviceCommunicator> on = c.on(gpu.place);
  ASSERT_EQ(on->name(), "nccl");
  ASSERT_TRUE(on->has_collectives());
  constexpr Index kCount = 1000;
  const Index ranks = c.ranks();
  c.reset_traffic();
  for (const Index gap : {Index{0}, Index{8}}) {
    float* mine = gpu.put(values(kCount, 1, c.rank()));
    float* all = gpu.put(std::vector<float>(at(ranks * (kCount + gap))));
    std::vector<Block> to;
    for (Index r = 0; r < ranks; ++r) to.push_back(floats(all + r * (kCount + gap), kCount));
    on->all_gather(floats(mine, kCount), to).wait();
    for (Index r = 0; r < ranks; ++r)
      EXPECT_EQ(gpu.get(all + r * (kCount + gap), kCount), values(kCount, 1, r)) << "gap " << gap;
    float* sum = gpu.put(std::vector<float>(kCount));
    on->reduce_scatter(to, floats(sum, kCount)).wait();  // every rank has the same parts
    const std::vector<float> got = gpu.get(sum, kCount), one = values(kCount, 1, c.rank());
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_NEAR(got[i], one[i] * static_cast<float>(ranks), 1e-4F) << "gap " << gap;
  }
  c.check();
  const Index each = kCount * Index{sizeof(float)} * (ranks - 1);
  EXPECT_EQ(c.traffic().bytes_sent, 4 * each);
  EXPECT_EQ(c.traffic().messages_received, 4 * (ranks - 1));
  for (int i = 0; i < 200 && c.flight_record().find("in the stream") != std::string::npos; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  expect_parts(c.flight_record(), {"all_gather", "reduce_scatter", "done after"});
}

class NcclRanks : public testing::TestWithParam<Index> {
  void SetUp() override {
    if (gpus() == 0) GTEST_SKIP() << "no GPU";
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, NcclRanks, testing::Values(2, 4, 8));

TEST_P(NcclRanks, Collectives) { run(GetParam(), check_collectives); }

// Both directions of a mesh at once, each a connection of its own.
TEST_P(NcclRanks, PartsOfTheWorld) {
  run(GetParam(), [](Communicator& c, OnGpu& gpu) {
    const auto row = c.split(c.rank() / 2, c.rank()), column = c.split(c.rank() % 2, c.rank());
    const auto on_row = row->on(gpu.place), on_column = column->on(gpu.place);
    float *along = gpu.put(values(64, 2, c.rank())), *across = gpu.put(std::vector<float>(64)),
          *from_row = gpu.put(std::vector<float>(64));
    const auto next = [](const Communicator& part) { return (part.rank() + 1) % part.ranks(); };
    const auto last = [](const Communicator& part) { return (part.rank() + part.ranks() - 1) % part.ranks(); };
    Request first = on_row->send_receive(next(*row), floats(along, 64), last(*row), floats(from_row, 64));
    on_column->send_receive(next(*column), floats(along, 64), last(*column), floats(across, 64)).wait();
    first.wait();
    EXPECT_EQ(gpu.get(from_row, 64), values(64, 2, c.rank() / 2 * 2 + last(*row)));
    EXPECT_EQ(gpu.get(across, 64), values(64, 2, last(*column) * 2 + c.rank() % 2));
  });
}

// ---- attention

// The fastest that takes the problem on this GPU.
std::string kernel_for(const RanksProblem& p) {
  const KernelRequest request{
      .pass = Pass::backward, .dtype = p.dtype, .dim_qk = p.dim_qk, .dim_v = p.dim_v, .device = DeviceKind::cuda};
  for (const Kernel& kernel : kernels())
    if (kernel.name == "cuda.sm90" && !kernel.refusal(request)) return "cuda.sm90";
  return "cuda.portable";
}

RanksProblem documents(Index ranks) {
  return {
      .problem = Problem(Stream::from_lengths(std::vector<Index>{700, 60, 264}).padded_to(2 * ranks), {.causal = true}),
      .heads_q = 8,
      .heads_k = 8,
      .dim_qk = 64,
      .dim_v = 64,
      .dtype = DType::bf16,
      .sink = true};
}

// Whether the rows of `rank` are the same in both.
bool same_rows(const Layout& layout, Index rank, const check::Tensor& a, const check::Tensor& b) {
  const std::vector<Index> tokens = layout.tokens(rank);
  return std::all_of(tokens.begin(), tokens.end(), [&](Index token) {
    const auto row = static_cast<std::ptrdiff_t>(a.row_bytes()), begin = static_cast<std::ptrdiff_t>(token) * row;
    return token == kNoToken ||
           std::equal(a.bytes.begin() + begin, a.bytes.begin() + begin + row, b.bytes.begin() + begin);
  });
}

RanksResult attend(Communicator& c, const RanksProblem& p, RanksInput& in, const Layouts& layouts,
                   const ScheduleOptions& options, ExecutorOptions how) {
  how.kernel = kernel_for(p);
  RanksResult result = empty_result(p, layouts.q.ranks());
  std::mutex mutex;
  run_one_rank(c, p, in, layouts, options, how, result, mutex);
  return result;
}

// A rank's rows have the bits that one rank alone gives them.
TEST_P(NcclRanks, AllGatherHasTheBitsOfOneRank) {
  run(GetParam(), [](Communicator& c, OnGpu&) {
    const RanksProblem p = documents(c.ranks());
    RanksInput in(p);
    const RanksResult one = run_on_ranks(p, in, make_layouts(LayoutKind::zigzag, p.problem, 1),
                                         {.key_order = KeyOrder::sequence}, {.kernel = kernel_for(p)});
    const Layouts layouts = make_layouts(LayoutKind::zigzag, p.problem, c.ranks());
    for (const Index groups : {1, 2}) {
      const RanksResult many = attend(c, p, in, layouts, {.key_order = KeyOrder::sequence, .head_groups = groups}, {});
      EXPECT_TRUE(same_rows(layouts.q, c.rank(), many.out, one.out)) << groups << " groups";
      EXPECT_TRUE(same_rows(layouts.q, c.rank(), many.lse, one.lse)) << groups << " groups";
      EXPECT_EQ(many.max_logit.bytes, one.max_logit.bytes);
    }
  });
}

// Swaps of heads in groups of heads: the forward of one group, and bytes and messages as traffic() says.
TEST_P(NcclRanks, HeadGroupsOfASwapHaveTheBitsOfOne) {
  run(GetParam(), [](Communicator& c, OnGpu&) {
    const RanksProblem p = documents(c.ranks());
    RanksInput in(p);
    const Layouts layouts = make_layouts(LayoutKind::zigzag, p.problem, c.ranks());
    const TensorShape shape{.dtype = p.dtype, .dim_qk = p.dim_qk, .dim_v = p.dim_v, .max_logit = true, .dsink = true};
    for (const ScheduleOptions& options : {ScheduleOptions{.kind = ScheduleKind::all_to_all, .head_groups = 4},
                                           {.kind = ScheduleKind::hybrid, .head_groups = 2}}) {
      ScheduleOptions at_once = options;
      at_once.head_groups = 1;
      const RanksResult whole = attend(c, p, in, layouts, at_once, {.deterministic = true});
      const RanksResult got = attend(c, p, in, layouts, options, {.deterministic = true});
      EXPECT_TRUE(same_rows(layouts.q, c.rank(), got.out, whole.out)) << words(options);
      EXPECT_TRUE(same_rows(layouts.q, c.rank(), got.lse, whole.lse)) << words(options);
      EXPECT_TRUE(same_rows(layouts.q, c.rank(), got.dq, whole.dq)) << words(options);
      EXPECT_TRUE(same_rows(layouts.k, c.rank(), got.dk, whole.dk)) << words(options);
      const Schedule schedule = make_schedule(p.problem, layouts, c.rank(), {p.heads_q, p.heads_k}, options);
      EXPECT_EQ(got.forward[at(c.rank())], traffic(schedule, shape, Pass::forward)) << words(options);
      EXPECT_EQ(got.backward[at(c.rank())], traffic(schedule, shape, Pass::backward)) << words(options);
    }
  });
}

TEST_P(NcclRanks, DeterministicGradientsAreTheSameInFiveRuns) {
  run(GetParam(),
      [](Communicator& c, OnGpu&) {
        const RanksProblem p = documents(c.ranks());
        RanksInput in(p);
        const Layouts layouts = make_layouts(LayoutKind::zigzag, p.problem, c.ranks());
        for (const ScheduleKind kind : schedule_kinds()) {
          const auto once = [&] { return attend(c, p, in, layouts, {.kind = kind}, {.deterministic = true}); };
          const RanksResult first = once();
          for (int i = 1; i < 5; ++i) EXPECT_TRUE(same_bytes(once(), first)) << name(kind) << ", run " << i;
        }
      },
      {.time_limit = 60, .grace = 10});
}

// Nodes of half of the ranks: bytes, and those between nodes, to the byte as traffic() says.
TEST_P(NcclRanks, BytesPerLevelAreThoseOfTraffic) {
  run(GetParam(), [](Communicator& c, OnGpu&) {
    const RanksProblem p = documents(c.ranks());
    RanksInput in(p);
    const Layouts layouts = make_layouts(LayoutKind::zigzag, p.problem, c.ranks());
    const TensorShape shape{.dtype = p.dtype,
                            .dim_qk = p.dim_qk,
                            .dim_v = p.dim_v,
                            .out = p.dtype,
                            .dout = p.dtype,
                            .dq = p.dtype,
                            .lse = DType::f32,
                            .max_logit = true,
                            .dsink = true};
    for (const ScheduleKind kind : {ScheduleKind::all_gather, ScheduleKind::exact}) {
      const ScheduleOptions options{.kind = kind, .node = c.ranks() / 2};
      const RanksResult got = attend(c, p, in, layouts, options, {});
      const Schedule schedule = make_schedule(p.problem, layouts, c.rank(), {p.heads_q, p.heads_k}, options);
      EXPECT_EQ(got.forward[at(c.rank())], traffic(schedule, shape, Pass::forward)) << name(kind);
      EXPECT_EQ(got.backward[at(c.rank())], traffic(schedule, shape, Pass::backward)) << name(kind);
      if (c.ranks() > 2) {
        EXPECT_GT(got.forward[at(c.rank())].bytes_sent_between, 0) << name(kind);
      }
    }
  });
}

TEST_P(NcclRanks, CheckedRanksHaveTheSameBits) {
  run(GetParam(), [](Communicator& c, OnGpu&) {
    const RanksProblem p = documents(c.ranks());
    RanksInput in(p);
    const Layouts layouts = make_layouts(LayoutKind::zigzag, p.problem, c.ranks());
    for (const ScheduleKind kind : {ScheduleKind::ring, ScheduleKind::exact, ScheduleKind::all_to_all}) {
      const RanksResult plain = attend(c, p, in, layouts, {.kind = kind}, {.deterministic = true});
      const RanksResult checked = attend(c, p, in, layouts, {.kind = kind}, {.deterministic = true, .checked = true});
      EXPECT_TRUE(same_bytes(checked, plain)) << name(kind);
    }
  });
}

TEST_P(NcclRanks, AMessageThatChangesOnItsWayIsNamed) {
  const std::string error = error_of([&] {
    run(GetParam(), [](Communicator& c, OnGpu&) {
      const RanksProblem p = documents(c.ranks());
      RanksInput in(p);
      // The first two calls compare problem and arguments on the host; then keys move.
      const auto faulty = make_faulty(c, {{.kind = Fault::Kind::corrupt, .rank = 0, .call = 2, .seed = 3}});
      const Layouts layouts = make_layouts(LayoutKind::zigzag, p.problem, c.ranks());
      const std::string said =
          error_of([&] { attend(*faulty, p, in, layouts, {.kind = ScheduleKind::ring}, {.checked = true}); });
      if (said.empty()) throw std::runtime_error("was not told");
      // The rank that noticed it leaves, and calls of the others end with data that means nothing.
      const bool noticed = said.find("received other bytes than were sent from rank 0") != std::string::npos;
      throw PeerError(said, "there is nothing to do: it was asked for", !noticed);
    });
  });
  expect_parts(error, {"received other bytes than were sent from rank 0"});
}

// ---- ranks that disagree

// What each rank is told in each of the ways, one after another, over connections of their own.
void disagree(Index ranks, const std::vector<std::size_t>& ways) {
  constexpr std::array kKinds{ScheduleKind::all_gather, ScheduleKind::ring, ScheduleKind::all_to_all,
                              ScheduleKind::exact};
  run(ranks,
      [&](Communicator& c, OnGpu&) {
        for (const std::size_t n : ways) {
          const Disagreement& way = disagreements()[n];
          std::snprintf(at_work, sizeof at_work, "rank %d, %s", static_cast<int>(c.rank()), way.name.c_str());
          const ScheduleKind kind = way.swapped ? ScheduleKind::all_to_all : kKinds[n % kKinds.size()];
          const RankTask task = task_of(way, {.kind = kind}, c.rank(), 1);
          const auto begin = std::chrono::steady_clock::now();
          const std::string told = error_of([&] {
            const auto part = c.split(0, c.rank());  // passes are counted from the first again
            run_task(*part, task, "cuda.portable");
          });
          const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
          EXPECT_NE(told, "") << "rank " << c.rank() << ", " << way.name << ", " << name(kind);
          if (c.rank() == 1 || ranks == 2) {
            EXPECT_NE(told.find(way.said), std::string::npos) << way.name << ", " << name(kind) << ": " << told;
          }
          if (c.rank() == 0)
            std::printf("%s, %s: %.1f s\n", way.name.c_str(), std::string(name(kind)).c_str(), seconds);
          std::fflush(stdout);
          double one = 1;
          c.all_reduce(&one, DType::f64, 1, Reduce::sum).wait();  // nobody begins the next way before all are told
        }
      },
      {.time_limit = 10, .grace = 10});
}

TEST(NcclDisagree, EveryRankIsTold) {
  if (gpus() == 0) GTEST_SKIP() << "no GPU";
  std::vector<std::size_t> all(disagreements().size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  disagree(2, all);
}

TEST(NcclDisagree, EveryRankOfFourIsTold) {
  if (gpus() == 0) GTEST_SKIP() << "no GPU";
  disagree(4, {0, 5, 8});
}

// ---- failure

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
        {.time_limit = 10, .grace = 5});  // NCCL alone takes seconds to start where GPUs are busy
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

// WEFT_FAILURES: so many plans, WEFT_SEED: others.
TEST_P(NcclRanks, TheRankThatFailsIsNamed) {
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
