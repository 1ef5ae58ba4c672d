// Weft's NCCL communicator between processes (gpu_ranks.h): collectives, parts of the world, attention, graphs. Ranks
// that fail: failing_test.cpp. Schedules, layouts, masks and dtypes over NCCL: weft verify --comm processes.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "comm/faulty.h"
#include "comm/letters.h"
#include "device/device.h"
#include "nccl/gpu_ranks.h"
#include "ranks.h"
#include "refusal.h"
#include "weft/capacity.h"
#include "weft/device_plan.h"
#include "weft/executor.h"
#include "weft/kernel.h"

namespace weft::test {
namespace {

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
      attend(*faulty, p, in, layouts, {.kind = ScheduleKind::ring}, {.checked = true});
    });
  });
  expect_parts(error, {"received other bytes than were sent from rank 0"});
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

}  // namespace
}  // namespace weft::test
