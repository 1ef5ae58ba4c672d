// Every schedule on ranks that share a GPU, forward and backward, against the dense softmax in f64.
#include "weft/executor.h"

#include <cstdlib>
#include <map>
#include <numeric>
#include <string>

#include <gtest/gtest.h>

#include "check/by_schedule.h"
#include "check/random_case.h"
#include "device/device.h"
#include "weft/error.h"
#include "weft/kernel.h"

namespace weft {
namespace {

constexpr const char* kKernel = "cuda.portable";

TEST(DeviceExecutor, EqualsTheDefinitionOnRandomProblems) {
  if (device::count() == 0) GTEST_SKIP() << "no GPU";
  const char* asked = std::getenv("WEFT_GPU_PROBLEMS");
  const int problems = asked != nullptr ? std::atoi(asked) : 300;
  std::map<std::string, int> compared;
  for (int seed = 0; seed < problems; ++seed) {
    check::RandomChoices choices(static_cast<unsigned long long>(seed));
    check::Case c = check::random_case(choices, static_cast<LayoutKind>(seed % 5));
    if (c.dtype == DType::f64) c.dtype = DType::bf16;
    check::Oracle oracle(c, check::executor_arithmetic(c));
    for (const ScheduleKind kind : schedule_kinds()) {
      const ScheduleOptions options{
          .kind = kind, .head_groups = min_of(c.heads_k, 2), .inside = std::gcd(c.ranks, Index{2})};
      const check::Tried tried = check::try_schedule(oracle, c, {.schedule = options, .kernel = kKernel});
      ASSERT_FALSE(tried.failure) << "seed " << seed << ": " << *tried.failure << "\n" << check::flags(c);
      if (!tried.report) continue;
      ASSERT_TRUE(tried.report->ok()) << "seed " << seed << " " << name(kind) << "\n" << check::flags(c);
      ++compared[std::string(name(kind))];
    }
  }
  for (const ScheduleKind kind : schedule_kinds())
    EXPECT_GT(compared[std::string(name(kind))], problems / 4) << name(kind);
}

TEST(DeviceExecutor, RefusesTensorsOfTheOtherPlace) {
  if (device::count() == 0) GTEST_SKIP() << "no GPU";
  run_ranks(1, [](Communicator& ranks) {
    const std::vector<Index> lengths{4};
    const Problem problem(Stream::from_lengths(lengths), {});
    const Layout layout = Layout::contiguous(problem.packing().q(), 1);
    Executor executor(ranks, make_schedule(problem, {layout, layout}, 0, {}),
                      {.place = {.kind = DeviceKind::cuda, .device = 0, .stream = device::thread_stream()}});
    std::vector<float> x(4);
    const TensorView view = thd(x.data(), DType::f32, 4, 1, 1);
    EXPECT_THROW(executor.forward({.q = view, .k = view, .v = view, .out = view}), Error);
  });
}

}  // namespace
}  // namespace weft
