// The GPU kernel's backward against the dense formula, at once and in parts of the keys, and against answers known
// exactly.
#include <cmath>
#include <cstdlib>
#include <limits>

#include "kernel/cuda/gpu_problem.h"
#include "refusal.h"
#include "weft/error.h"

namespace weft::test {
namespace {

class GpuBackward : public GpuTest {
 protected:
  static void expect_all(MakeProblems make, bool each_norm) {
    for (const bool deterministic : {false, true}) {
      Judge judge(dtype(), each_norm);
      int n = 0;
      for (const Judged& j : judged(dtype(), Pass::backward, make)) {
        SCOPED_TRACE(j.problem.name + (deterministic ? ", deterministic" : ""));
        const Outputs got(j.problem.p, n++ % 2 == 0 ? DType::f32 : DType::f64);
        gpu_run(got, j.problem, Pass::backward, deterministic);
        judge.backward(got.backward, j.want, j.problem.p);
      }
    }
  }
  // Parts of the keys, gradients in f32: shares of dq add up, and dk and dv are added to where they lie.
  static void expect_parts_add_up(Index dqk, Index dv) {
    SCOPED_TRACE("dims " + std::to_string(dqk) + ":" + std::to_string(dv));
    const AttentionProblem base{
        .tq = 70, .tk = 131, .hq = 4, .hk = 2, .dqk = dqk, .dv = dv, .dtype = dtype(), .sink = Sink::Kind::learnable};
    KernelProblem problem{"", base};
    AttentionProblem& p = problem.p;
    p.slices = {{0, 50, 0, 100, -kUnlimited, 45}, {55, 70, 90, 131, -30, 60}};
    Random random(21);
    p.fill(random);
    const Outputs whole(p);
    gpu_attend(whole.forward_args(problem));
    const check::Expected want =
        check::expected(problem.dense(), problem.dout(), check::kernel_arithmetic(dtype(), DType::f32));
    std::vector<double> dq(at(p.tq * p.hq * p.dqk));
    Backward sums(p, DType::f32);
    sums.dk.set(std::vector<double>(at(p.tk * p.hk * p.dqk), 0.0));
    sums.dv.set(std::vector<double>(at(p.tk * p.hk * p.dv), 0.0));
    for (const Range keys : {Range{64, 131}, Range{0, 1}, Range{1, 64}}) {
      const std::vector<Slice> part = keys_of(p.slices, keys);
      KernelBackwardArgs args = whole.backward_args(problem);
      args.slices = part;
      args.dq = sums.dq.view();
      args.dk = sums.dk.view();
      args.dv = sums.dv.view();
      args.add_keys = true;
      args.dsink = {};
      gpu_attend_backward(args);
      const std::vector<double> share = sums.dq.values();
      for (std::size_t i = 0; i < dq.size(); ++i) dq[i] += share[i];
    }
    Judge judge(dtype(), true);
    judge.close("dq", dq, want.dq, p.hq, p.dqk);
    judge.close("dk", sums.dk.values(), want.dk, p.hk, p.dqk);
    judge.close("dv", sums.dv.values(), want.dv, p.hk, p.dv);
  }
};
WEFT_FOR_EACH_GPU_KERNEL(GpuBackward);

TEST_P(GpuBackward, EveryFeature) { expect_all(feature_problems, true); }
TEST_P(GpuBackward, RandomPlans) { expect_all(planned_problems, false); }
TEST_P(GpuBackward, Wide) { expect_all(wide_problems, true); }

// Both passes on anything; WEFT_CUDA_PROBLEMS says how many.
TEST_P(GpuBackward, RandomProblems) {
  const char* asked = std::getenv("WEFT_CUDA_PROBLEMS");
  const int problems = asked != nullptr ? std::atoi(asked) : 60;
  const char* from = std::getenv("WEFT_CUDA_SEED");
  const unsigned first = from != nullptr ? static_cast<unsigned>(std::atoi(from)) : 1000;
  Judge plain(dtype(), false), steep(dtype(), false, false);
  for (int i = 0; i < problems; ++i) {
    Random random(first + static_cast<unsigned>(i));
    const KernelProblem problem = random_problem(random, dtype());
    const AttentionProblem& p = problem.p;
    SCOPED_TRACE("problem " + std::to_string(first) + " + " + std::to_string(i) + ": rows " + std::to_string(p.tq) +
                 ", keys " + std::to_string(p.tk) + ", dims " + std::to_string(p.dqk) + ":" + std::to_string(p.dv));
    const Outputs got(p);
    gpu_run(got, problem, Pass::backward, i % 3 == 0);
    const check::Expected want = expected_of(problem, Pass::backward);
    Judge& judge = std::abs(p.scale.value_or(0)) * std::sqrt(static_cast<double>(p.dqk)) > 2 ? steep : plain;
    judge.forward(got.forward, want, p);
    judge.backward(got.backward, want, p);
    if (HasFailure()) break;
  }
}

TEST_P(GpuBackward, OutAndLseMayBeLeftOut) {
  Judge judge(dtype(), false);
  for (const Judged& j : judged(dtype(), Pass::backward, wide_problems)) {
    SCOPED_TRACE(j.problem.name);
    const Outputs got(j.problem.p);
    KernelBackwardArgs args = got.backward_args(j.problem);
    args.out = args.lse = {};
    gpu_attend_backward(args);
    judge.backward(got.backward, j.want, j.problem.p);
  }
}

TEST_P(GpuBackward, PartsOfTheKeysAddUp) {
  constexpr std::pair<Index, Index> kDims[] = {{24, 24}, {192, 128}, {256, 256}};
  for (const auto& [dqk, dv] : kDims) expect_parts_add_up(dqk, dv);
}

// The keys in parts, a call each, and dq of all of them by the last.
TEST_P(GpuBackward, QueryStepsGiveTheWhole) {
  const Kernel& kernel = find_kernel(gpu_kernel);
  if (kernel.takes_steps_backward == nullptr) GTEST_SKIP() << "calls of this kernel do not sum up";
  Judge judge(dtype(), true);
  Random random(28);
  Index done = 0;
  std::vector<const Judged*> problems;
  for (const MakeProblems make : {feature_problems, wide_problems})
    for (const Judged& j : judged(dtype(), Pass::backward, make)) problems.push_back(&j);
  for (const Judged* problem : problems) {
    const Judged& j = *problem;
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
    OnGpu gpu;
    KernelBackwardArgs args = on_gpu(gpu, host);
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

TEST_P(GpuBackward, QueryStepsHaveOneDq) {
  if (find_kernel(gpu_kernel).takes_steps_backward == nullptr) GTEST_SKIP() << "calls of this kernel do not sum up";
  KernelProblem problem{"", {.tq = 40, .tk = 90, .hq = 2, .hk = 2, .dtype = dtype(), .slices = {{0, 40, 10, 30}}}};
  Random random(29);
  problem.p.fill(random);
  const Outputs got(problem.p), other(problem.p);
  gpu_attend(got.forward_args(problem));
  OnGpu gpu;
  KernelBackwardArgs args = on_gpu(gpu, got.backward_args(problem));
  args.dsink = {};
  const std::vector<Range> rows = {{0, 40}};
  QuerySteps steps{.rows = rows};
  args.steps = &steps;
  attend_backward(args, gpu_kernel);
  args.dq = gpu.out(other.backward.dq.view());
  expect_refusal([&] { attend_backward(args, gpu_kernel); }, {"another dq", "the same dq"});
}

// Keys that nobody sees keep what they have, bit for bit, and so do K/V heads that nobody uses.
TEST_P(GpuBackward, AddingLeavesOtherKeysAlone) {
  KernelProblem problem{
      "", {.tq = 40, .tk = 90, .hq = 2, .hk = 2, .dtype = dtype(), .slices = {{0, 40, 10, 30}}}, {1, 1}};
  AttentionProblem& p = problem.p;
  Random random(27);
  p.fill(random);
  const Outputs got(p);
  gpu_attend(got.forward_args(problem));
  const Backward sums(p, DType::f32);  // NaN, every byte 0xff
  KernelBackwardArgs args = got.backward_args(problem);
  args.dk = sums.dk.view();
  args.dv = sums.dv.view();
  args.add_keys = true;
  const auto all_ones = [](const Buffer& b, Index row, Index head) {
    const unsigned* at = static_cast<const unsigned*>(b.view().data) + b.view().offset(row, head);
    return *at == 0xffffffffu;
  };
  gpu_attend_backward(args);
  for (Index row = 0; row < p.tk; ++row)
    for (Index head = 0; head < 2; ++head) {
      const bool alone = head == 0 || row < 10 || row >= 30;
      if (!alone) continue;
      EXPECT_TRUE(all_ones(sums.dk, row, head)) << row << ", " << head;
      EXPECT_TRUE(all_ones(sums.dv, row, head)) << row << ", " << head;
    }
}

TEST_P(GpuBackward, InputsOfAnyDType) {
  KernelProblem problem{"", {.tq = 30, .tk = 45, .dqk = 16, .dv = 16, .dtype = dtype()}};
  AttentionProblem& p = problem.p;
  p.slices = {{0, 28, 2, 45, -kUnlimited, 15}};
  Random random(26);
  p.fill(random);
  std::vector<double> whole(at(p.tq * p.hq * p.dv));  // exact in every dtype
  for (double& x : whole) x = static_cast<double>(random.index(-8, 8));
  const check::Expected want = check::expected(problem.dense(), whole, check::kernel_arithmetic(dtype(), dtype()));
  for (const DType of_dout : kDTypes) {
    for (const DType of_out : kDTypes) {
      if (of_out != dtype() && size_of(of_out) <= size_of(dtype())) continue;  // would round it once more
      SCOPED_TRACE(std::string(name(of_dout)) + " dout, " + std::string(name(of_out)) + " out");
      const Outputs got(p);
      Buffer dout(of_dout, p.tq, p.hq, p.dv), out(of_out, p.tq, p.hq, p.dv);
      dout.set(whole);
      gpu_run(got, problem, Pass::forward);
      out.set(got.forward.out.values());
      KernelBackwardArgs args = got.backward_args(problem);
      args.dout = dout.view();
      args.out = out.view();
      gpu_attend_backward(args);
      Judge judge(dtype(), true);
      judge.backward(got.backward, want, p);
    }
  }
}

// A row with one key: the true gradient of its logit is zero; dv is dout, summed over the heads of the group.
TEST_P(GpuBackward, OneKeyHasNoGradientOfTheLogit) {
  KernelProblem problem{
      "", {.tq = 300, .tk = 300, .hq = 2, .dqk = 33, .dv = 33, .dtype = dtype(), .slices = {{0, 200, 0, 300, 40, 40}}}};
  const AttentionProblem& p = problem.p;
  Random random(22);
  problem.p.fill(random);
  const Outputs got(p);
  gpu_run(got, problem, Pass::backward);
  // |dout·v| <= 33·4; logits' slope 1 / sqrt(33); |k| <= 2; a sum of 33 terms in two orders, one of them cut off.
  const double tiny = 4 * 33 * 0x1p-24 * 33 * 4 / std::sqrt(33.0) * 2;
  for (const double x : got.backward.dq.values()) ASSERT_LE(std::abs(x), tiny);
  for (const double x : got.backward.dk.values()) ASSERT_LE(std::abs(x), 2 * tiny);
  const std::vector<double> dv = got.backward.dv.values(), dout = problem.dout();
  for (Index row = 0; row < 200; ++row) {
    for (Index i = 0; i < p.dv; ++i) {
      const double want = dout[at(row * 2 * p.dv + i)] + dout[at((row * 2 + 1) * p.dv + i)];
      ASSERT_NEAR(dv[at((row + 40) * p.dv + i)], want, check::rounding(dtype()).of(want) + 1e-5) << row << ", " << i;
    }
  }
}

// A NaN that a row sees shows in all that depends on it, and in no other document than those of its tiles.
TEST_P(GpuBackward, ANanShows) {
  KernelProblem problem{"", {.tq = 400, .tk = 400, .hq = 1, .dtype = dtype()}};
  AttentionProblem& p = problem.p;
  p.slices = {{0, 20, 0, 40}, {200, 400, 200, 400}};
  Random random(25);
  p.fill(random);
  std::vector<double> q = p.q.values();
  q[at(7 * p.dqk)] = std::numeric_limits<double>::quiet_NaN();
  p.q.set(q);
  const Outputs got(p);
  gpu_run(got, problem, Pass::backward);
  const std::vector<double> dq = got.backward.dq.values(), dk = got.backward.dk.values();
  EXPECT_TRUE(std::isnan(dq[at(7 * p.dqk)]));
  for (Index key = 0; key < 40; ++key) EXPECT_TRUE(std::isnan(dk[at(key * p.dqk)])) << "key " << key;
  for (Index row = 40; row < 400; ++row) {
    EXPECT_FALSE(std::isnan(dq[at(row * p.dqk)])) << "row " << row;
    EXPECT_FALSE(std::isnan(dk[at(row * p.dqk)])) << "key " << row;
  }
}

TEST_P(GpuBackward, GivenLseIsUsed) {
  KernelProblem problem{"", {.tq = 40, .tk = 60, .dtype = dtype(), .slices = {{0, 40, 0, 60, -kUnlimited, 20}}}};
  Random random(24);
  problem.p.fill(random);
  Outputs got(problem.p);
  gpu_run(got, problem, Pass::backward);
  const std::vector<double> before = got.backward.dv.values();
  std::vector<double> lse = got.forward.lse.values();
  for (double& x : lse) x += 1;
  got.forward.lse.set(lse);
  gpu_attend_backward(got.backward_args(problem));
  const std::vector<double> after = got.backward.dv.values();
  for (std::size_t i = 0; i < after.size(); ++i) {
    EXPECT_NEAR(after[i], before[i] / std::exp(1.0), 8 * check::rounding(dtype()).relative + 1e-5) << i;
  }
}

}  // namespace
}  // namespace weft::test
