// Schedules in CUDA graphs, over Weft's own NCCL between processes (nccl_test.cpp).
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "comm/letters.h"
#include "nccl/on_gpu.h"
#include "weft/capacity.h"
#include "weft/device_plan.h"
#include "weft/executor.h"
#include "weft/processes.h"

namespace weft::test {
namespace {

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

class NcclGraphs : public testing::TestWithParam<Index> {
  void SetUp() override {
    if (gpus() == 0) GTEST_SKIP() << "no GPU";
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, NcclGraphs, testing::Values(2, 4));

TEST_P(NcclGraphs, AreReplayedOnOtherOffsets) {
  for (const ScheduleOptions& options : {ScheduleOptions{.kind = ScheduleKind::all_gather},
                                         {.kind = ScheduleKind::ring},
                                         {.kind = ScheduleKind::all_to_all},
                                         {.kind = ScheduleKind::hybrid, .ulysses = 2}}) {
    SCOPED_TRACE(words(options));
    run_processes(GetParam(),
                  [&](Communicator& c) {
                    ::setenv("NCCL_HOSTID", std::to_string(c.rank()).c_str(), 1);
                    OnGpu gpu(c);
                    GraphOfASchedule(c, gpu, options).check();
                    if (HasFailure()) throw std::runtime_error("an expectation failed, see above");
                  },
                  {.time_limit = 20, .grace = 10});
  }
}

}  // namespace
}  // namespace weft::test
