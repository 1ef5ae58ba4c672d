// QuerySteps: calls with the same queries and parts of the keys, whose sums stay with the kernel from call to call.
#include <functional>
#include <limits>

#include "kernel/cuda/gpu_problem.h"
#include "refusal.h"

namespace weft::test {
namespace {

class GpuQuerySteps : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (find_kernel(gpu_kernel).takes_steps == nullptr) GTEST_SKIP() << "calls of this kernel do not sum up";
  }
};
WEFT_FOR_EACH_GPU_KERNEL(GpuQuerySteps);

// Values that are infinite, and seen by some rows only: other rows of their tile keep what they had before.
TEST_P(GpuQuerySteps, KeepInfinitiesApart) {
  KernelProblem problem = make_problem({.tq = 24, .tk = 40, .hq = 2, .hk = 1, .dqk = 64, .dv = 64, .dtype = dtype()},
                                       {{0, 10, 0, 20}, {2, 6, 20, 30}, {10, 20, 30, 40}}, 20);
  AttentionProblem& p = problem.p;
  std::vector<double> v = p.v.values();
  for (Index key = 20; key < 40; ++key)
    for (Index i = 0; i < p.dv; ++i) v[at(key * p.dv + i)] = std::numeric_limits<double>::infinity();
  p.v.set(v);
  const Outputs got(p);
  ASSERT_TRUE(attend_in_steps(gpu_kernel, got, problem, {{0, 20}, {20, 30}, {30, 40}}));
  const std::vector<double> out = got.forward.out.values();
  for (Index row = 0; row < p.tq; ++row) {
    const double x = out[at(row * p.hq * p.dv)];
    const bool infinite = (row >= 2 && row < 6) || (row >= 10 && row < 20);
    EXPECT_EQ(std::isfinite(x), !infinite) << row;
    if (row >= 20) {
      EXPECT_EQ(x, 0) << row;
    }
  }
}

// Rows that end before the last call, of an output that the kernel does not write itself: its rows lie at odd places.
TEST_P(GpuQuerySteps, RowsThatEndStayUntilTheLastCall) {
  const KernelProblem problem = make_problem({.tq = 400, .tk = 60, .hq = 2, .dqk = 20, .dv = 20, .dtype = dtype()},
                                             {{0, 200, 0, 30}, {200, 400, 0, 60}}, 22);
  const check::Expected want = expected_of(problem, Pass::forward);
  const Outputs got(problem.p);
  ASSERT_TRUE(attend_in_steps(gpu_kernel, got, problem, {{0, 30}, {30, 60}}, true));
  Judge judge(dtype(), true);
  judge.out_and_lse(got.forward, want, problem.p);
}

// Rows that are said to have ended get no more keys, and rows go to one output.
TEST_P(GpuQuerySteps, AfterTheEndAreRefused) {
  const KernelProblem problem =
      make_problem({.tq = 20, .tk = 40, .hq = 2, .dqk = 64, .dv = 64, .dtype = dtype()}, {{0, 20, 0, 40}}, 21);
  const Outputs got(problem.p);
  OnDevice gpu(gpu_kernel);
  KernelForwardArgs args = gpu.bind(got.forward_args(problem));
  args.max_logit = {};
  ASSERT_TRUE(find_kernel(gpu_kernel).takes_steps(args));
  const std::vector<Range> rows = {{0, 20}};
  const std::vector<Index> ends = {0};
  QuerySteps steps{.rows = rows, .ends = ends};
  args.steps = &steps;
  const std::vector<Slice> first = {{0, 20, 0, 30}}, second = {{0, 20, 30, 40}};
  args.slices = first;
  attend(args, gpu_kernel);
  args.slices = second;
  steps.last = true;
  expect_refusal([&] { attend(args, gpu_kernel); }, {"which ended before it"});
  steps.ends = {};
  args.out = gpu.out(got.forward.out.view());
  expect_refusal([&] { attend(args, gpu_kernel); }, {"another out than the first"});
}

// The keys in parts, a call each, and dq of all of them by the last.
TEST_P(GpuQuerySteps, BackwardGivesTheWhole) {
  const Kernel& kernel = find_kernel(gpu_kernel);
  Judge judge(dtype(), true);
  Random random(28);
  Index done = 0;
  std::vector<std::reference_wrapper<const Judged>> problems;
  for (const MakeProblems make : {feature_problems, wide_problems})
    for (const Judged& j : judged(dtype(), Pass::backward, make)) problems.emplace_back(j);
  for (const Judged& j : problems) {
    SCOPED_TRACE(j.problem.name);
    const AttentionProblem& p = j.problem.p;
    const Outputs got(p);
    gpu_attend(got.forward_args(j.problem));
    Backward sums(p, DType::f32);
    sums.dk.set(std::vector<double>(at(p.tk * p.hk * p.dqk), 0.0));
    sums.dv.set(std::vector<double>(at(p.tk * p.hk * p.dv), 0.0));
    KernelBackwardArgs host = got.backward_args(j.problem);
    host.dsink = {};
    if (!kernel.takes_steps_backward(host)) continue;
    ++done;
    host.dk = sums.dk.view();
    host.dv = sums.dv.view();
    host.add_keys = true;
    std::vector<Range> rows;
    for (const Slice& s : p.slices) rows.push_back({s.q_begin, s.q_end});
    QuerySteps steps{.rows = rows};
    OnDevice gpu(gpu_kernel);
    KernelBackwardArgs args = gpu.bind(host);
    args.steps = &steps;
    const Index cut = random.index(0, p.tk), other = random.index(cut, p.tk);
    const Range parts[] = {{other, p.tk}, {0, cut}, {cut, other}};
    for (const Range& keys : parts) {
      const std::vector<Slice> part = keys_of(p.slices, keys);
      args.slices = part;
      steps.last = &keys == &parts[2];
      attend_backward(args, gpu_kernel);
    }
    EXPECT_EQ(steps.state, nullptr);
    gpu.finish();
    judge.close("dq", got.backward.dq.values(), j.want.dq, p.hq, p.dqk);
    judge.close("dk", sums.dk.values(), j.want.dk, p.hk, p.dqk);
    judge.close("dv", sums.dv.values(), j.want.dv, p.hk, p.dv);
  }
  EXPECT_GT(done, 3);
}

TEST_P(GpuQuerySteps, BackwardHasOneDq) {
  const KernelProblem problem =
      make_problem({.tq = 40, .tk = 90, .hq = 2, .hk = 2, .dtype = dtype()}, {{0, 40, 10, 30}}, 29);
  const Outputs got(problem.p), other(problem.p);
  gpu_attend(got.forward_args(problem));
  OnDevice gpu(gpu_kernel);
  KernelBackwardArgs args = gpu.bind(got.backward_args(problem));
  args.dsink = {};
  const std::vector<Range> rows = {{0, 40}};
  QuerySteps steps{.rows = rows};
  args.steps = &steps;
  attend_backward(args, gpu_kernel);
  args.dq = gpu.out(other.backward.dq.view());
  expect_refusal([&] { attend_backward(args, gpu_kernel); }, {"another dq", "the same dq"});
}

}  // namespace
}  // namespace weft::test
