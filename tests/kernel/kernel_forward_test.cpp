// Every kernel's forward against the dense formula, at once and in partial steps, and against answers known exactly.
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "kernel/kernel_features.h"
#include "kernel/key_parts.h"

namespace weft::test {
namespace {

class KernelForward : public ForwardKernelTest {
 protected:
  void expect_all(MakeProblems make, bool each_norm) {
    Judge judge(dtype(), each_norm);
    int n = 0;
    for (const Judged& j : judged(dtype(), Pass::forward, make)) {
      SCOPED_TRACE(j.problem.name);
      const Outputs got(j.problem.p, n++ % 2 == 0 ? DType::f32 : DType::f64);
      got.run(j.problem, kernel(), Pass::forward);
      judge.forward(got.forward, j.want, j.problem.p);
    }
  }
};
WEFT_FOR_EACH_KERNEL(KernelForward);

TEST_P(KernelForward, EveryFeature) { expect_all(feature_problems, true); }
TEST_P(KernelForward, RandomPlans) { expect_all(planned_problems, false); }
TEST_P(KernelForward, Wide) { expect_all(wide_problems, true); }
TEST_P(KernelForward, HeadDimsAbove256) {
  if (const auto reason = refusal({.dim_qk = 576, .dim_v = 512})) GTEST_SKIP() << *reason;
  expect_all(problems_above_256, true);
}

// Of latent attention V is the first columns of K: read from where K is, with the bits of a copy.
TEST_P(KernelForward, ValuesMayBeColumnsOfKeys) {
  for (const auto& [dqk, dv] : {std::pair<Index, Index>{576, 512}, {328, 300}, {40, 24}}) {
    if (const auto reason = refusal({.dim_qk = dqk, .dim_v = dv})) continue;
    for (const ViewKind view : {ViewKind::thd, ViewKind::gaps, ViewKind::sbhd}) {
      SCOPED_TRACE(std::to_string(dqk) + ":" + std::to_string(dv) + ", view " + std::to_string(static_cast<int>(view)));
      const KernelProblem problem =
          make_problem({.tq = 150, .tk = 231, .hq = 4, .hk = 1, .dqk = dqk, .dv = dv, .dtype = dtype(), .view = view},
                       {{2, 70, 3, 200, -kUnlimited, 90}, {70, 150, 100, 231, -60, 60}}, 19);
      const AttentionProblem& p = problem.p;
      const Outputs shared(p), copied(p);
      ConstTensorView columns = p.k.view();
      columns.dim = dv;
      Buffer copy(dtype(), p.tk, 1, dv);
      copy.set(to_f64(columns));
      KernelForwardArgs args = shared.forward_args(problem);
      read_from(args, p.q.view(), p.k.view(), columns);
      attend_on(kernel(), args);
      args = copied.forward_args(problem);
      read_from(args, p.q.view(), p.k.view(), copy.view());
      attend_on(kernel(), args);
      expect_same_bits(shared, copied, Pass::forward);
    }
  }
}

// Outputs need not be of the inputs' dtype: what is asked for in f32 is not rounded to 16 bits first.
TEST_P(KernelForward, OutputsOfAnyDType) {
  for (const DType to : kDTypes) {
    SCOPED_TRACE(name(to));
    const KernelProblem problem =
        make_problem({.tq = 30, .tk = 45, .dqk = 16, .dv = 21, .dtype = dtype(), .view = ViewKind::gaps},
                     {{0, 28, 2, 45, -kUnlimited, 15}}, 16);
    const AttentionProblem& p = problem.p;
    check::Arithmetic by = check::kernel_arithmetic(dtype(), dtype());
    by.out = check::rounding(to);
    const Forward got(p, to);
    attend_on(kernel(), got.args(p));
    const auto either = [&](DType d) { return dtype() == d || to == d; };
    Judge judge(either(DType::bf16) ? DType::bf16 : either(DType::f16) ? DType::f16 : DType::f32, true);
    judge.forward(got, check::expected(problem.dense(), {}, by), p);
  }
}

// Keys in parts and in any order: each call adds its part, and the end is the whole.
TEST_P(KernelForward, PartialStepsGiveTheWhole) {
  if (const auto reason = refusal({.partial = true})) GTEST_SKIP() << *reason;
  Judge judge(dtype(), true);
  Random random(11);
  int stepped = 0;
  const auto judge_all = [&](MakeProblems make) {
    for (const Judged& j : judged(dtype(), Pass::forward, make)) {
      SCOPED_TRACE(j.problem.name);
      if (judge_parts(judge, kernel(), j.problem, j.want, random_parts(random, j.problem.p.tk))) ++stepped;
    }
  };
  judge_all(feature_problems);
  if (!refusal({.dim_qk = 576, .dim_v = 512})) judge_all(problems_above_256);
  if (find_kernel(kernel()).takes_steps != nullptr) {
    EXPECT_GT(stepped, 5);
  }
}

// Rows that see no key of this call keep their state, bit for bit.
TEST_P(KernelForward, PartialStepsLeaveOtherRowsAlone) {
  if (const auto reason = refusal({.partial = true})) GTEST_SKIP() << *reason;
  const KernelProblem problem = make_problem({.tq = 30, .tk = 40, .hq = 2, .dtype = dtype()},
                                             {{3, 9, 0, 40}, {12, 25, 0, 40, -kUnlimited, -20}}, 12);
  const AttentionProblem& p = problem.p;
  Buffer sums(DType::f32, p.tq, p.hq, p.dv);
  sums.set(std::vector<double>(at(p.tq * p.hq * p.dv), 7.25));
  std::vector<RowState<float>> states(at(p.tq * p.hq), {-1.5F, 3.0F});
  const Outputs none(p);
  KernelForwardArgs args = none.forward_args(problem);
  args.out = args.lse = args.max_logit = {};
  args.partial = {sums.view(), states.data()};
  attend_on(kernel(), args);
  const std::vector<double> sum = sums.values();
  for (Index row = 0; row < p.tq; ++row) {
    const bool same = states[at(row * p.hq)] == RowState<float>{-1.5F, 3.0F};
    EXPECT_NE(same, p.q_used[at(row)]) << "row " << row;
    EXPECT_NE(sum[at(row * p.hq * p.dv)] == 7.25, p.q_used[at(row)]) << "row " << row;
  }
}

// Queries of zero: every probability is one over the number of keys. Values are small whole numbers, so that their sums
// are exact, and only the division and the last rounding are not.
TEST_P(KernelForward, ZeroQueriesGiveMeans) {
  const Index tokens = kSanitized ? 700 : 2500;
  const Stream stream = padded({3, 3 + tokens, 40 + tokens}, {tokens - 6, 29}, tokens + 50);
  for (const Mask& mask : {Mask{.causal = true}, Mask{.left = 300, .right = 70}}) {
    KernelProblem problem{"", masked({.hq = 2, .hk = 1, .dqk = 20, .dv = 9, .dtype = dtype()}, stream, mask)};
    AttentionProblem& p = problem.p;
    Random random(13);
    p.fill(random);
    std::vector<double> v(at(p.tk * p.dv));
    for (double& x : v) x = static_cast<double>(random.index(-8, 8));
    p.v.set_used(v, p.k_used);
    p.q.set_used(std::vector<double>(at(p.tq * p.hq * p.dqk)), p.q_used);
    const Outputs got(p);
    got.run(problem, kernel(), Pass::forward);

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
      const double count = static_cast<double>(keys.size());
      for (Index head = 0; head < p.hq; ++head) {
        const double got_lse = lse[at(row * p.hq + head)], want_lse = std::log(count);
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
}

// A row with one key: its probability is exactly 1, and the output is the value, bit for bit.
TEST_P(KernelForward, OneKeyGivesItsValue) {
  const KernelProblem problem = make_problem({.tq = 300, .tk = 300, .hq = 2, .dqk = 33, .dv = 33, .dtype = dtype()},
                                             {{0, 150, 0, 300, 40, 40}, {150, 300, 20, 21}}, 14);
  const AttentionProblem& p = problem.p;
  const Outputs got(p);
  got.run(problem, kernel(), Pass::forward);
  const std::vector<double> out = got.forward.out.values(), v = p.v.values();
  for (Index row = 0; row < p.tq; ++row) {
    const Index key = row < 150 ? row + 40 : 20;
    for (Index i = 0; i < p.hq * p.dv; ++i) {
      ASSERT_EQ(out[at(row * p.hq * p.dv + i)], v[at(key * p.dv + i % p.dv)]) << "row " << row << ", " << i;
    }
  }
}

// Logits far past what exp can take, and a NaN that must show in its row and in no other.
TEST_P(KernelForward, HugeLogitsDoNotOverflowAndANanShows) {
  KernelProblem problem = make_problem({.tq = 20, .tk = 90, .hq = 1, .dqk = 4, .dv = 4, .dtype = dtype(), .scale = 1.0},
                                       {{0, 20, 0, 90}}, 15);
  AttentionProblem& p = problem.p;
  std::vector<double> q(at(p.tq * p.dqk)), k(at(p.tk * p.dqk));
  for (Index row = 0; row < p.tq; ++row) q[at(row * p.dqk)] = 200;
  for (Index key = 0; key < p.tk; ++key) k[at(key * p.dqk)] = key == 70 ? 250 : static_cast<double>(-key);
  p.q.set(q);
  p.k.set(k);
  const Outputs plain(p), bad(p);
  plain.run(problem, kernel(), Pass::forward);
  const std::vector<double> v = p.v.values(), want(v.begin() + 70 * p.dv, v.begin() + 71 * p.dv);
  const std::vector<double> out = plain.forward.out.values();
  for (Index row = 0; row < p.tq; ++row) {
    EXPECT_EQ(std::vector<double>(out.begin() + row * p.dv, out.begin() + (row + 1) * p.dv), want) << "row " << row;
    EXPECT_NEAR(plain.forward.lse.values()[at(row)], 50000, 0.02);
  }
  EXPECT_NEAR(plain.forward.max_logit.values()[0], 50000, 0.02);

  q[at(7 * p.dqk)] = std::numeric_limits<double>::quiet_NaN();
  p.q.set(q);
  bad.run(problem, kernel(), Pass::forward);
  EXPECT_TRUE(std::isnan(bad.forward.max_logit.values()[0]));
  for (Index row = 0; row < p.tq; ++row) {
    EXPECT_EQ(std::isnan(bad.forward.lse.values()[at(row)]), row == 7) << "row " << row;
    EXPECT_EQ(std::isnan(bad.forward.out.values()[at(row * p.dv)]), row == 7) << "row " << row;
  }
}

TEST_P(KernelForward, GrowingLogits) {
  Judge judge(dtype(), false);
  std::vector<MakeProblems> problems = fewer_if_sanitized<MakeProblems>({growing_problem<40>, growing_problem<128>}, 1);
  // CPU kernels add 249 small products to a large first one, which may take more than the 16 roundings allowed.
  if (on_gpu()) problems.push_back(growing_problem<250>);
  for (const MakeProblems make : problems) {
    const Judged& j = judged(dtype(), Pass::forward, make).front();
    SCOPED_TRACE(j.problem.name);
    const AttentionProblem& p = j.problem.p;
    const Outputs got(p), plain(p);
    got.run(j.problem, kernel(), Pass::forward);
    judge.forward(got.forward, j.want, p);
    KernelForwardArgs args = plain.forward_args(j.problem);
    args.max_logit = {};  // cuda.sm90 has another instance for callers that do not ask for it
    attend_on(kernel(), args);
    judge.out_and_lse(plain.forward, j.want, p);
    // The first keys of a later part outgrow the states of the parts before.
    judge_parts(judge, kernel(), j.problem, j.want, {{0, 300}, {300, 310}, {310, 900}});
  }
}

// f32 has its whole range: where a kernel splits it into parts of bf16, they neither overflow nor underflow before the
// sum does.
TEST_P(KernelForward, LargeAndSmallValues) {
  if (dtype() != DType::f32) GTEST_SKIP() << "for f32";
  for (const double size : {3.4e38, 1e36, 1e30, 1e-30, 1e-36}) {
    Slice slice{0, 20, 0, 40};
    if (size > 1e38) slice.lo = slice.hi = 3;  // one key each: a sum of several would pass the largest float
    KernelProblem problem = make_problem({.tq = 20, .tk = 40, .dqk = 8, .dv = 8, .dtype = DType::f32}, {slice}, 17);
    AttentionProblem& p = problem.p;
    std::vector<double> v = p.v.values();
    for (double& x : v) x *= size / 2;
    p.v.set(v);
    const Outputs got(p);
    got.run(problem, kernel(), Pass::forward);
    const check::Comparison c =
        check::worst_element(got.forward.out.values(), expected_of(problem, Pass::forward).out, p.hq, p.dv);
    EXPECT_LE(c.ratio, 1) << size << ": got " << c.got << ", expected " << c.expected << ", allowed " << c.bound;
  }
}

}  // namespace
}  // namespace weft::test
