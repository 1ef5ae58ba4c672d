// The GPU kernel's forward against the dense formula, at once and in partial steps, and against answers known exactly.
#include <cmath>
#include <limits>

#include "cuda/stream_array.h"
#include "kernel/cuda/gpu_problem.h"
#include "weft/error.h"

namespace weft::test {
namespace {

class GpuForward : public GpuTest {
 protected:
  static void expect_all(MakeProblems make, bool each_norm) {
    Judge judge(dtype(), each_norm);
    int n = 0;
    for (const Judged& j : judged(dtype(), Pass::backward, make)) {
      SCOPED_TRACE(j.problem.name);
      const Outputs got(j.problem.p, n++ % 2 == 0 ? DType::f32 : DType::f64);
      gpu_run(got, j.problem, Pass::forward);
      judge.forward(got.forward, j.want, j.problem.p);
    }
  }
};
WEFT_FOR_EACH_GPU_KERNEL(GpuForward);

TEST_P(GpuForward, EveryFeature) { expect_all(feature_problems, true); }
TEST_P(GpuForward, RandomPlans) { expect_all(planned_problems, false); }
TEST_P(GpuForward, Wide) { expect_all(wide_problems, true); }

TEST_P(GpuForward, OutputsOfAnyDType) {
  for (const DType to : kDTypes) {
    SCOPED_TRACE(name(to));
    KernelProblem problem{"", {.tq = 30, .tk = 45, .dqk = 16, .dv = 21, .dtype = dtype(), .view = ViewKind::gaps}};
    AttentionProblem& p = problem.p;
    p.slices = {{0, 28, 2, 45, -kUnlimited, 15}};
    Random random(16);
    p.fill(random);
    check::Arithmetic by = check::kernel_arithmetic(dtype(), dtype());
    by.out = check::rounding(to);
    const Forward got(p, to);
    gpu_attend(got.args(p));
    const auto either = [&](DType d) { return dtype() == d || to == d; };
    Judge judge(either(DType::bf16) ? DType::bf16 : either(DType::f16) ? DType::f16 : DType::f32, true);
    judge.forward(got, check::expected(problem.dense(), {}, by), p);
  }
}

// The keys in parts, a call each: partial states, or sums that the kernel keeps.
void attend_partially(const Outputs& got, const KernelProblem& problem, const std::vector<Range>& parts) {
  const AttentionProblem& p = problem.p;
  const Buffer sums(p.view, DType::f32, p.tq, p.hq, p.dv);
  std::vector<RowState<float>> states(at(p.tq * p.hq));
  ForwardArgs end = got.forward_args(problem);
  end.partial = {sums.view(), states.data()};
  ForwardArgs step = end;
  step.out = step.lse = step.max_logit = {};
  for (const Range keys : parts) {
    const std::vector<Slice> part = keys_of(p.slices, keys);
    step.slices = part;
    gpu_attend(step);
  }
  gpu_finish_partial(end);
}
// What a call gave back, another one finds full of NaN: as many bytes as it may have taken for `out` in f32.
void spoil_memory(const ForwardArgs& args) {
  const auto stream = static_cast<cudaStream_t>(args.place.stream);
  const std::size_t bytes = at(args.out.rows * args.out.heads * args.out.dim) * sizeof(float);
  const cuda::StreamArray<char> memory(bytes, stream);
  WEFT_CUDA(cudaMemsetAsync(memory.get(), 0xff, bytes, stream));
}
// False if the kernel does not do that. `said`: where rows end.
bool attend_in_steps(const Outputs& got, const KernelProblem& problem, const std::vector<Range>& parts,
                     bool said = false) {
  const AttentionProblem& p = problem.p;
  OnGpu gpu;
  ForwardArgs args = on_gpu(gpu, got.forward_args(problem));
  args.max_logit = {};
  const Kernel& kernel = find_kernel(gpu_kernel);
  if (kernel.takes_steps == nullptr || !kernel.takes_steps(args)) return false;
  std::vector<Range> rows;
  for (const Slice& s : p.slices) rows.push_back({s.q_begin, s.q_end});
  std::vector<Index> ends(rows.size(), 0);
  for (std::size_t n = 0; n < parts.size(); ++n)
    for (const Slice& s : keys_of(p.slices, parts[n]))
      for (std::size_t r = 0; r < rows.size(); ++r)
        if (s.q_begin < rows[r].end && s.q_end > rows[r].begin) ends[r] = static_cast<Index>(n);
  QuerySteps steps{.rows = rows, .ends = said ? std::span<const Index>(ends) : std::span<const Index>{}};
  args.steps = &steps;
  for (std::size_t n = 0; n < parts.size(); ++n) {
    const std::vector<Slice> part = keys_of(p.slices, parts[n]);
    args.slices = part;
    steps.last = n + 1 == parts.size();
    attend(args, gpu_kernel);
    spoil_memory(args);
  }
  EXPECT_EQ(steps.kept, nullptr);
  gpu.finish();
  return true;
}
bool judge_parts(Judge& judge, const KernelProblem& problem, const check::Expected& want,
                 const std::vector<Range>& parts) {
  const AttentionProblem& p = problem.p;
  const Outputs partly(p), stepped(p);
  attend_partially(partly, problem, parts);
  judge.forward(partly.forward, want, p);
  if (!attend_in_steps(stepped, problem, parts)) return false;
  judge.close("out", stepped.forward.out.values(), want.out, p.hq, p.dv);
  judge.close("lse", stepped.forward.lse.values(), want.lse, p.hq, 1);
  const Outputs ended(p);  // written when rows end, not by the last call
  attend_in_steps(ended, problem, parts, true);
  judge.close("out", ended.forward.out.values(), want.out, p.hq, p.dv);
  judge.close("lse", ended.forward.lse.values(), want.lse, p.hq, 1);
  return true;
}

// The later part first: the end is the whole.
TEST_P(GpuForward, PartialStepsGiveTheWhole) {
  Judge judge(dtype(), true);
  Random random(11);
  int stepped = 0;
  for (const Judged& j : judged(dtype(), Pass::backward, feature_problems)) {
    SCOPED_TRACE(j.problem.name);
    const Index tk = j.problem.p.tk, cut = random.index(0, tk);
    if (judge_parts(judge, j.problem, j.want, {{cut, tk}, {0, cut}})) ++stepped;
  }
  if (std::string_view(gpu_kernel) == "cuda.sm90") {
    EXPECT_GT(stepped, 5);
  }
}

// Values that are infinite, and seen by some rows only: other rows of their tile keep what they had before.
TEST_P(GpuForward, StepsKeepInfinitiesApart) {
  KernelProblem problem{"",
                        {.tq = 24,
                         .tk = 40,
                         .hq = 2,
                         .hk = 1,
                         .dqk = 64,
                         .dv = 64,
                         .dtype = dtype(),
                         .slices = {{0, 10, 0, 20}, {2, 6, 20, 30}, {10, 20, 30, 40}}}};
  AttentionProblem& p = problem.p;
  Random random(20);
  p.fill(random);
  std::vector<double> v = p.v.values();
  for (Index key = 20; key < 40; ++key)
    for (Index i = 0; i < p.dv; ++i) v[at(key * p.dv + i)] = std::numeric_limits<double>::infinity();
  p.v.set(v);
  const Outputs got(p);
  if (!attend_in_steps(got, problem, {{0, 20}, {20, 30}, {30, 40}})) GTEST_SKIP();
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
TEST_P(GpuForward, RowsThatEndStayUntilTheLastCall) {
  KernelProblem problem{"", {.tq = 400, .tk = 60, .hq = 2, .dqk = 20, .dv = 20, .dtype = dtype()}};
  problem.p.slices = {{0, 200, 0, 30}, {200, 400, 0, 60}};
  Random random(22);
  problem.p.fill(random);
  const check::Expected want = expected_of(problem, Pass::forward);
  const Outputs got(problem.p);
  if (!attend_in_steps(got, problem, {{0, 30}, {30, 60}}, true)) GTEST_SKIP();
  Judge judge(dtype(), true);
  judge.close("out", got.forward.out.values(), want.out, problem.p.hq, problem.p.dv);
  judge.close("lse", got.forward.lse.values(), want.lse, problem.p.hq, 1);
}

// Rows that are said to have ended get no more keys, and rows go to one output.
TEST_P(GpuForward, StepsAfterTheEndAreRefused) {
  KernelProblem problem{
      "", {.tq = 20, .tk = 40, .hq = 2, .dqk = 64, .dv = 64, .dtype = dtype(), .slices = {{0, 20, 0, 40}}}};
  Random random(21);
  problem.p.fill(random);
  const Outputs got(problem.p);
  OnGpu gpu;
  ForwardArgs args = on_gpu(gpu, got.forward_args(problem));
  args.max_logit = {};
  const Kernel& kernel = find_kernel(gpu_kernel);
  if (kernel.takes_steps == nullptr || !kernel.takes_steps(args)) GTEST_SKIP();
  const std::vector<Range> rows = {{0, 20}};
  const std::vector<Index> ends = {0};
  QuerySteps steps{.rows = rows, .ends = ends};
  args.steps = &steps;
  const std::vector<Slice> first = {{0, 20, 0, 30}}, second = {{0, 20, 30, 40}};
  args.slices = first;
  attend(args, gpu_kernel);
  args.slices = second;
  steps.last = true;
  const auto refusal = [&]() -> std::string {
    try {
      attend(args, gpu_kernel);
    } catch (const Error& e) {
      return e.problem();
    }
    return "";
  };
  EXPECT_NE(refusal().find("which ended before it"), std::string::npos);
  steps.ends = {};
  args.out = gpu.out(got.forward.out.view());
  EXPECT_NE(refusal().find("another out than the first"), std::string::npos);
}

TEST_P(GpuForward, PartialStepsLeaveOtherRowsAlone) {
  KernelProblem problem{
      "",
      {.tq = 30, .tk = 40, .hq = 2, .dtype = dtype(), .slices = {{3, 9, 0, 40}, {12, 25, 0, 40, -kUnlimited, -20}}}};
  const AttentionProblem& p = problem.p;
  Random random(12);
  problem.p.fill(random);
  Buffer sums(DType::f32, p.tq, p.hq, p.dv);
  sums.set(std::vector<double>(at(p.tq * p.hq * p.dv), 7.25));
  std::vector<RowState<float>> states(at(p.tq * p.hq), {-1.5F, 3.0F});
  const Outputs none(p);
  ForwardArgs args = none.forward_args(problem);
  args.out = args.lse = args.max_logit = {};
  args.partial = {sums.view(), states.data()};
  gpu_attend(args);
  const std::vector<double> sum = sums.values();
  for (Index row = 0; row < p.tq; ++row) {
    const bool same = states[at(row * p.hq)] == RowState<float>{-1.5F, 3.0F};
    EXPECT_NE(same, p.q_used[at(row)]) << "row " << row;
    EXPECT_NE(sum[at(row * p.hq * p.dv)] == 7.25, p.q_used[at(row)]) << "row " << row;
  }
}

// Queries of zero: every share is one over the number of keys.
TEST_P(GpuForward, ZeroQueriesGiveMeans) {
  const Index tokens = 1500;
  const Stream stream = padded({3, 3 + tokens, 40 + tokens}, {tokens - 6, 29}, tokens + 50);
  KernelProblem problem{"", masked({.hq = 2, .hk = 1, .dqk = 20, .dv = 9, .dtype = dtype()}, stream, {.causal = true})};
  AttentionProblem& p = problem.p;
  Random random(13);
  p.fill(random);
  std::vector<double> v(at(p.tk * p.dv));
  for (double& x : v) x = static_cast<double>(random.index(-8, 8));
  p.v.set_used(v, p.k_used);
  p.q.set_used(std::vector<double>(at(p.tq * p.hq * p.dqk)), p.q_used);
  const Outputs got(p);
  gpu_run(got, problem, Pass::forward);
  const std::vector<double> out = got.forward.out.values(), lse = got.forward.lse.values();
  const check::Rounding rounding = check::rounding(dtype());
  std::vector<double> sums(at((p.tk + 1) * p.dv));  // of the first keys
  for (std::size_t i = at(p.dv); i < sums.size(); ++i) sums[i] = sums[i - at(p.dv)] + v[i - at(p.dv)];
  for (Index row = 0; row < p.tq; ++row) {
    Range keys;
    for (const Slice& s : p.slices) {
      if (row < s.q_begin || row >= s.q_end) continue;
      keys = {max_of(s.k_begin, shift_bound(s.lo, row)), min_of(s.k_end, shift_bound(s.hi, row + 1))};
    }
    const double count = static_cast<double>(keys.size()), want_lse = std::log(count);
    for (Index head = 0; head < p.hq; ++head) {
      const double got_lse = lse[at(row * p.hq + head)];
      ASSERT_TRUE(got_lse == want_lse || std::abs(got_lse - want_lse) <= 1e-6 * want_lse) << "row " << row;
      for (Index i = 0; i < p.dv; ++i) {
        const double sum = sums[at(keys.end * p.dv + i)] - sums[at(keys.begin * p.dv + i)];
        const double mean = keys.size() == 0 ? 0 : sum / count;
        ASSERT_NEAR(out[at((row * p.hq + head) * p.dv + i)], mean, rounding.of(mean) + 0x1p-22 * std::abs(mean))
            << "row " << row << ", head " << head << ", " << i;
      }
    }
  }
}

// A row with one key: its share is exactly 1, and the output is the value, bit for bit.
TEST_P(GpuForward, OneKeyGivesItsValue) {
  KernelProblem problem{"",
                        {.tq = 300,
                         .tk = 300,
                         .hq = 2,
                         .dqk = 33,
                         .dv = 33,
                         .dtype = dtype(),
                         .slices = {{0, 150, 0, 300, 40, 40}, {150, 300, 20, 21}}}};
  const AttentionProblem& p = problem.p;
  Random random(14);
  problem.p.fill(random);
  const Outputs got(p);
  gpu_run(got, problem, Pass::forward);
  const std::vector<double> out = got.forward.out.values(), v = p.v.values();
  for (Index row = 0; row < p.tq; ++row) {
    const Index key = row < 150 ? row + 40 : 20;
    for (Index i = 0; i < p.hq * p.dv; ++i) {
      ASSERT_EQ(out[at(row * p.hq * p.dv + i)], v[at(key * p.dv + i % p.dv)]) << "row " << row << ", " << i;
    }
  }
}

// Logits far past what exp can take, and a NaN that must show in its row and in no other.
TEST_P(GpuForward, HugeLogitsDoNotOverflowAndANanShows) {
  KernelProblem problem{
      "", {.tq = 20, .tk = 90, .hq = 1, .dqk = 4, .dv = 4, .dtype = dtype(), .scale = 1.0, .slices = {{0, 20, 0, 90}}}};
  AttentionProblem& p = problem.p;
  Random random(15);
  p.fill(random);
  std::vector<double> q(at(p.tq * p.dqk)), k(at(p.tk * p.dqk));
  for (Index row = 0; row < p.tq; ++row) q[at(row * p.dqk)] = 200;
  for (Index key = 0; key < p.tk; ++key) k[at(key * p.dqk)] = key == 70 ? 250 : static_cast<double>(-key);
  p.q.set(q);
  p.k.set(k);
  const Outputs plain(p), bad(p);
  gpu_run(plain, problem, Pass::forward);
  const std::vector<double> v = p.v.values(), want(v.begin() + 70 * p.dv, v.begin() + 71 * p.dv);
  const std::vector<double> out = plain.forward.out.values();
  for (Index row = 0; row < p.tq; ++row) {
    EXPECT_EQ(std::vector<double>(out.begin() + row * p.dv, out.begin() + (row + 1) * p.dv), want) << "row " << row;
    EXPECT_NEAR(plain.forward.lse.values()[at(row)], 50000, 0.02);
  }
  EXPECT_NEAR(plain.forward.max_logit.values()[0], 50000, 0.02);

  q[at(7 * p.dqk)] = std::numeric_limits<double>::quiet_NaN();
  p.q.set(q);
  gpu_run(bad, problem, Pass::forward);
  EXPECT_TRUE(std::isnan(bad.forward.max_logit.values()[0]));
  for (Index row = 0; row < p.tq; ++row) {
    EXPECT_EQ(std::isnan(bad.forward.lse.values()[at(row)]), row == 7) << "row " << row;
    EXPECT_EQ(std::isnan(bad.forward.out.values()[at(row * p.dv)]), row == 7) << "row " << row;
  }
}

// Logits that grow from tile to tile of keys, in some rows beyond what exp can take, in rows beside them not at all.
TEST_P(GpuForward, GrowingLogits) {
  for (const Index width : {40, 128, 250}) {
    SCOPED_TRACE(width);
    KernelProblem problem{"",
                          {.tq = 300,
                           .tk = 900,
                           .hq = 4,
                           .hk = 2,
                           .dqk = width,
                           .dv = width,
                           .dtype = dtype(),
                           .scale = 1.0,
                           .slices = {{0, 170, 5, 880, -kUnlimited, 700}, {180, 300, 0, 900, -120, 500}}}};
    AttentionProblem& p = problem.p;
    Random random(17);
    p.fill(random);
    std::vector<double> q = p.q.values(), k = p.k.values();
    // An error of a logit is one of its share: what is asked of f32's norm holds for small logits.
    const double most = dtype() == DType::f32 ? 0.5 : 30, steps[] = {0, 0.25, -1, 1, most / 4, most};
    for (Index row = 0; row < p.tq; ++row)
      for (Index head = 0; head < p.hq; ++head)
        for (Index i = 0; i < p.dqk; ++i) {
          double& x = q[at((row * p.hq + head) * p.dqk + i)];
          x = i == 0 ? steps[at((row + 2 * head) % 6)] : x / 8;
        }
    for (Index key = 0; key < p.tk; ++key)
      for (Index head = 0; head < p.hk; ++head) k[at((key * p.hk + head) * p.dqk)] = static_cast<double>(key / 64);
    p.q.set_used(q, p.q_used);
    p.k.set_used(k, p.k_used);
    const Outputs got(p);
    gpu_run(got, problem, Pass::forward);
    Judge judge(dtype(), false);
    const check::Expected want = check::expected(problem.dense(), {}, check::kernel_arithmetic(dtype(), dtype()));
    judge.forward(got.forward, want, p);
    // Who does not ask for the largest logits is answered by another kernel.
    const Outputs plain(p);
    ForwardArgs args = plain.forward_args(problem);
    args.max_logit = {};
    gpu_attend(args);
    judge.close("out", plain.forward.out.values(), want.out, p.hq, p.dv);
    judge.close("lse", plain.forward.lse.values(), want.lse, p.hq, 1);
    // Kept states are outgrown by the first keys of a later part.
    judge_parts(judge, problem, want, {{0, 300}, {300, 310}, {310, 900}});
  }
}

// More tiles than a GPU has multiprocessors: blocks go from one to the next, of other lengths, some without keys.
TEST_P(GpuForward, ManyTilesForEachBlock) {
  Judge judge(dtype(), true);
  for (const Index width : {64, 128, 192, 256}) {
    if (width > 64 && std::string_view(gpu_kernel) != "cuda.sm90") break;  // the others' blocks have one tile each
    SCOPED_TRACE(width);
    KernelProblem problem{"",
                          {.tq = 340,
                           .tk = 300,
                           .hq = 140,
                           .hk = 140,
                           .dqk = width,
                           .dv = width == 192 ? 128 : width,
                           .dtype = dtype(),
                           .slices = {{0, 20, 0, 200},
                                      {20, 21, 3, 300},
                                      {140, 145, 100, 300, -kUnlimited, 0},
                                      {300, 310, 0, 300, -250, -100},
                                      {338, 340, 7, 10}}}};
    AttentionProblem& p = problem.p;
    Random random(18);
    p.fill(random);
    const check::Expected want = check::expected(problem.dense(), {}, check::kernel_arithmetic(dtype(), dtype()));
    for (const bool largest : {true, false}) {
      const Outputs got(p);
      ForwardArgs args = got.forward_args(problem);
      if (!largest) args.max_logit = {};
      gpu_attend(args);
      judge.close("out", got.forward.out.values(), want.out, p.hq, p.dv);
      judge.close("lse", got.forward.lse.values(), want.lse, p.hq, 1);
    }
    judge_parts(judge, problem, want, {{150, 300}, {0, 100}, {100, 150}});
  }
}

// Lists that are kept between calls of a stream are those of the slices that are asked for, and are used any number of
// times.
TEST_P(GpuForward, TheSameSlicesAgain) {
  Judge judge(dtype(), true);
  OnGpu gpu;
  Random random(19);
  const std::vector<Slice> some[] = {{{0, 40, 0, 200, -kUnlimited, 150}},
                                     {{0, 40, 0, 200, -kUnlimited, 149}},
                                     {{0, 20, 0, 100}, {20, 40, 100, 200, -60, 120}}};
  for (int round = 0; round < 3; ++round)
    for (const std::vector<Slice>& slices : some) {
      KernelProblem problem{
          "", {.tq = 40, .tk = 200, .hq = 70, .hk = 35, .dqk = 64, .dv = 64, .dtype = dtype(), .slices = slices}};
      problem.p.fill(random);
      const Outputs got(problem.p);
      gpu_attend(gpu, got.forward_args(problem));
      gpu_attend_backward(gpu, got.backward_args(problem));
      const check::Expected want =
          check::expected(problem.dense(), problem.dout(), check::kernel_arithmetic(dtype(), dtype()));
      judge.forward(got.forward, want, problem.p);
      judge.backward(got.backward, want, problem.p);
    }
}

// f32 has its whole range: parts of it as bf16 neither overflow nor go under before the sum does.
TEST(GpuForwardF32, LargeAndSmallValues) {
  if (find_kernel(kPortable).refusal({.dtype = DType::f32, .dim_qk = 8, .dim_v = 8, .device = DeviceKind::cuda}))
    GTEST_SKIP();
  for (const double size : {3.4e38, 1e36, 1e30, 1e-30, 1e-36}) {
    KernelProblem problem{"", {.tq = 20, .tk = 40, .dqk = 8, .dv = 8, .dtype = DType::f32, .slices = {{0, 20, 0, 40}}}};
    AttentionProblem& p = problem.p;
    if (size > 1e38)
      p.slices[0].lo = p.slices[0].hi = 3;  // one key each: a sum of several would pass the largest float
    Random random(17);
    p.fill(random);
    std::vector<double> v = p.v.values();
    for (double& x : v) x *= size / 2;
    p.v.set(v);
    const Outputs got(p);
    gpu_run(got, problem, Pass::forward);
    const check::Comparison c =
        check::worst_element(got.forward.out.values(), expected_of(problem, Pass::forward).out, p.hq, p.dv);
    EXPECT_LE(c.ratio, 1) << size << ": got " << c.got << ", expected " << c.expected << ", allowed " << c.bound;
  }
}

}  // namespace
}  // namespace weft::test
