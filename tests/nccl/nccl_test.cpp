// Weft's NCCL communicator between processes that share one GPU, or have one each: each says that it is a host of its
// own (NCCL_HOSTID), so NCCL takes sockets between them. CUDA is used after the fork only. A failed expectation in a
// rank becomes its failure. Schedules, layouts, masks and dtypes over NCCL: weft verify --comm processes.
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/letters.h"
#include "device/device.h"
#include "refusal.h"
#include "weft/capacity.h"
#include "weft/device_plan.h"
#include "weft/executor.h"
#include "weft/processes.h"

namespace weft::test {
namespace {

// Asks in a process of its own, because one that has used CUDA cannot fork ranks.
int gpus() {
  static const int count = [] {
    const pid_t child = ::fork();
    if (child == 0) std::_Exit(std::min(device::count(), 100));
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
  }();
  return count;
}

// Memory of the rank's GPU.
struct OnGpu {
  explicit OnGpu(const Communicator& c)
      : place{.kind = DeviceKind::cuda, .device = static_cast<int>(c.rank() % gpus())},
        memory(device::make_memory(place)) {}

  float* put(const std::vector<float>& values) {
    const Index bytes = static_cast<Index>(values.size() * sizeof(float));
    auto* data = static_cast<float*>(memory->allocate(at(bytes)));
    device::to_device(place, data, values.data(), bytes);
    return data;
  }
  std::vector<float> get(const float* data, Index count) const {
    std::vector<float> values(at(count));
    const device::HostCopy copy{values.data(), data, count * Index{sizeof(float)}};
    device::to_host(place, {&copy, 1});
    return values;
  }

  Place place;
  std::unique_ptr<device::Memory> memory;  // ends with the process
};

Block floats(float* data, Index count) { return {.data = data, .rows = 1, .bytes = count * Index{sizeof(float)}}; }

void run(Index ranks, const std::function<void(Communicator&, OnGpu&)>& body, double time_limit = 30) {
  run_processes(ranks,
                [&](Communicator& c) {
                  ::setenv("NCCL_HOSTID", std::to_string(c.rank()).c_str(), 1);
                  OnGpu gpu(c);
                  body(c, gpu);
                  if (testing::Test::HasFailure()) throw std::runtime_error("an expectation failed, see above");
                },
                {.time_limit = time_limit, .grace = 10});
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

// ---- graphs

// A schedule whose steps are planned on the GPU, forward and backward captured once: replays on other offsets give what
// the same schedule gives for documents that the host knows.
class GraphOfASchedule {
 public:
  static constexpr Index kTokens = 96, kDocuments = 4, kHeads = 4, kDim = 32;

  GraphOfASchedule(Communicator& c, OnGpu& gpu, const ScheduleOptions& options)
      : c_(c), gpu_(gpu), options_(options), rows_(kTokens / c.ranks()) {
    gpu.place.stream = device::thread_stream();
    gpu.memory->use(gpu.place.stream);
    for (Index what = 0; what < 8; ++what)
      all_.push_back(thd(gpu.put(values(rows_ * kHeads * kDim, what, c.rank())), DType::f32, rows_, kHeads, kDim));
    lse_ = thd(gpu.put(values(rows_ * kHeads, 9, c.rank())), DType::f32, rows_, kHeads, 1);
    cu_ = gpu.memory->allocate((kDocuments + 1) * sizeof(std::int32_t));
  }

  void check() {
    const CapacitySchedule made = capacity_schedule({c_.ranks(), c_.rank(), rows_, rows_}, {kHeads, kHeads}, options_);
    DeviceContext context(gpu_.place);
    std::vector<DevicePlan> plans;
    for (const MetRanks& met : made.met) plans.emplace_back(context, device_plan_capacity(asked(met)));
    std::vector<DevicePlan*> pointers;
    for (DevicePlan& plan : plans) pointers.push_back(&plan);
    Executor executor(c_, made.schedule, {.deterministic = true, .place = gpu_.place});
    const auto step = [&] {
      for (std::size_t i = 0; i < plans.size(); ++i) plans[i].plan(asked(made.met[i]));
      pass(executor, pointers);
    };
    set({0, 96, 96, 96, 96});
    step();  // NCCL begins outside of the capture
    const std::function<void()> replay = device::captured(gpu_.place, step);
    for (const std::vector<std::int32_t>& cu :
         std::vector<std::vector<std::int32_t>>{{0, 96, 96, 96, 96}, {0, 5, 40, 41, 96}, {0, 0, 24, 96, 96}}) {
      set(cu);
      replay();
      const std::vector<float> got = results();
      context.check();
      const Problem problem(Stream::from_cu_seqlens(cu), {.causal = true});
      Executor known(c_,
                     make_schedule(problem, make_layouts(LayoutKind::zigzag, problem, c_.ranks()), c_.rank(),
                                   {kHeads, kHeads}, options_),
                     {.place = gpu_.place});
      pass(known, {});
      const std::vector<float> want = results();
      for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-4F) << "number " << i;
    }
    c_.check();
  }

 private:
  DevicePlanArgs asked(const MetRanks& met) const {
    const DeviceLayout layout{LayoutKind::zigzag, c_.ranks(), rows_};
    return {.q = {.cu_seqlens = cu_, .sequences = kDocuments, .tokens = kTokens},
            .k = {},
            .mask = {.causal = true},
            .q_runs = layout.rank_order(met.q),
            .k_runs = layout.rank_order(met.k)};
  }
  void set(const std::vector<std::int32_t>& cu) {
    device::to_device(gpu_.place, cu_, cu.data(), static_cast<Index>(cu.size() * sizeof(std::int32_t)));
    device::synchronize(gpu_.place);
  }
  void pass(Executor& executor, std::span<DevicePlan* const> plans) {
    executor.forward({.q = all_[0],
                      .k = all_[1],
                      .v = all_[2],
                      .out = all_[4],
                      .lse = lse_,
                      .place = gpu_.place,
                      .device_plans = plans});
    executor.backward({.q = all_[0],
                       .k = all_[1],
                       .v = all_[2],
                       .dout = all_[3],
                       .out = all_[4],
                       .lse = lse_,
                       .dq = all_[5],
                       .dk = all_[6],
                       .dv = all_[7],
                       .place = gpu_.place,
                       .device_plans = plans});
  }
  std::vector<float> results() const {
    std::vector<float> found;
    for (const std::size_t i : {4, 5, 6, 7}) {
      const std::vector<float> one = gpu_.get(static_cast<const float*>(all_[i].data), rows_ * kHeads * kDim);
      found.insert(found.end(), one.begin(), one.end());
    }
    return found;
  }

  Communicator& c_;
  OnGpu& gpu_;
  ScheduleOptions options_;
  Index rows_;
  std::vector<TensorView> all_;  // q, k, v, dout, out, dq, dk, dv
  TensorView lse_;
  void* cu_ = nullptr;
};

TEST_P(NcclRanks, GraphsOfSchedules) {
  for (const ScheduleOptions& options : {ScheduleOptions{.kind = ScheduleKind::all_gather},
                                         {.kind = ScheduleKind::ring},
                                         {.kind = ScheduleKind::all_to_all},
                                         {.kind = ScheduleKind::hybrid, .ulysses = 2}}) {
    SCOPED_TRACE(words(options));
    run(GetParam(), [&](Communicator& c, OnGpu& gpu) { GraphOfASchedule(c, gpu, options).check(); });
  }
}

// ---- failure

enum class Harm { dies, stops, other_sizes };

// Rounds of messages around a ring until a rank fails, which every other rank must learn.
void until_failure(Communicator& c, OnGpu& gpu, Harm harm, bool is_victim, int when) {
  const auto on = c.on(gpu.place);
  constexpr Index kCount = 1 << 16;
  float *from = gpu.put(values(kCount, 1, c.rank())), *to = gpu.put(std::vector<float>(kCount));
  for (int round = 0;; ++round) {
    const bool now = is_victim && round == when;
    if (now && harm == Harm::dies) raise(SIGKILL);
    if (now && harm == Harm::stops) raise(SIGSTOP);
    const Index count = now && harm == Harm::other_sizes ? kCount / 2 : kCount;
    const Index ranks = c.ranks();
    on->send_receive((c.rank() + 1) % ranks, floats(from, count), (c.rank() + ranks - 1) % ranks, floats(to, count))
        .wait();
    device::synchronize(gpu.place);
    c.check();
  }
}

TEST_P(NcclRanks, TheRankThatFailsIsNamed) {
  const char* given = std::getenv("WEFT_FAILURES");
  std::mt19937_64 random(11);
  for (int i = 0; i < (given == nullptr ? 3 : std::atoi(given)); ++i) {
    const auto harm = static_cast<Harm>(i % 3);
    const auto victim = static_cast<Index>(random() % static_cast<std::uint64_t>(GetParam()));
    const auto when = static_cast<int>(random() % 20);
    const std::string name = "rank " + std::to_string(victim);
    SCOPED_TRACE("harm " + std::to_string(i % 3) + " to " + name + " in round " + std::to_string(when));
    const std::string error = error_of([&] {
      run(
          GetParam(),
          [&](Communicator& c, OnGpu& gpu) {
            const std::string said = error_of([&] { until_failure(c, gpu, harm, c.rank() == victim, when); });
            if (c.rank() != victim && said.find(name) == std::string::npos)
              throw std::runtime_error("the error does not name " + name + ": " + said);
            if (harm == Harm::other_sizes) check_collectives(c, gpu);  // over a new connection
          },
          10);
    });
    if (harm == Harm::dies) expect_parts(error, {name + ": was ended by signal 9"});
    EXPECT_EQ(error.find("does not name"), std::string::npos) << error;
    if (harm == Harm::other_sizes) {
      EXPECT_EQ(error, "");
    }
  }
}

}  // namespace
}  // namespace weft::test
