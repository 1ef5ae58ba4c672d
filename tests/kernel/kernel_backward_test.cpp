// Every kernel's backward against the dense formula, at once and in parts of the keys, and against answers known
// exactly.
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "kernel/kernel_features.h"
#include "weft/error.h"

namespace weft::test {
namespace {

class KernelBackward : public BackwardKernelTest {
 protected:
  void expect_all(MakeProblems make, bool each_norm) {
    Judge judge(dtype(), each_norm);
    int n = 0;
    for (const Judged& j : judged(dtype(), Pass::backward, make)) {
      SCOPED_TRACE(j.problem.name);
      const Outputs got(j.problem.p, n++ % 2 == 0 ? DType::f32 : DType::f64);
      got.run(j.problem, kernel(), Pass::backward);
      judge.backward(got.backward, j.want, j.problem.p);
    }
  }
};
WEFT_FOR_EACH_KERNEL(KernelBackward);

TEST_P(KernelBackward, EveryFeature) { expect_all(feature_problems, true); }
TEST_P(KernelBackward, HeadDimsAbove256) { expect_all(problems_above_256, true); }
TEST_P(KernelBackward, RandomPlans) { expect_all(planned_problems, false); }

// The forward's results may be left out; they are then computed anew.
TEST_P(KernelBackward, OutAndLseMayBeLeftOut) {
  Judge judge(dtype(), false);
  for (const Judged& j : judged(dtype(), Pass::backward, kSanitized ? planned_problems : feature_problems)) {
    SCOPED_TRACE(j.problem.name);
    const Outputs got(j.problem.p);
    KernelBackwardArgs args = got.backward_args(j.problem);
    args.out = args.lse = {};
    attend_backward(args, kernel());
    judge.backward(got.backward, j.want, j.problem.p);
  }
}

// With the whole row's out and lse each part of the keys gives its share; gradients in f32, as a ring sums them.
TEST_P(KernelBackward, PartsOfTheKeysAddUp) {
  const AttentionProblem base{
      .tq = 70, .tk = 131, .hq = 4, .hk = 2, .dqk = 24, .dv = 24, .dtype = dtype(), .sink = Sink::Kind::learnable};
  KernelProblem problem{"", base};
  AttentionProblem& p = problem.p;
  p.slices = {{0, 50, 0, 100, -kUnlimited, 45}, {55, 70, 90, 131, -30, 60}};
  Random random(21);
  p.fill(random);
  const Outputs whole(p);
  attend(whole.forward_args(problem), kernel());
  const check::Expected want =
      check::expected(problem.dense(), problem.dout(), check::kernel_arithmetic(dtype(), DType::f32));
  std::vector<double> dq(at(p.tq * p.hq * p.dqk)), dk(at(p.tk * p.hk * p.dqk)), dv(at(p.tk * p.hk * p.dv));
  const auto add = [](std::vector<double>& to, const Buffer& part) {
    const std::vector<double> values = part.values();
    for (std::size_t i = 0; i < to.size(); ++i) to[i] += values[i];
  };
  for (const Range keys : {Range{64, 131}, Range{0, 1}, Range{1, 64}}) {
    std::vector<Slice> part = p.slices;
    for (Slice& s : part) {
      s.k_begin = min_of(s.k_end, max_of(s.k_begin, keys.begin));
      s.k_end = max_of(s.k_begin, min_of(s.k_end, keys.end));
    }
    const Backward step(p, DType::f32);
    KernelBackwardArgs args = whole.backward_args(problem);
    args.slices = part;
    args.dq = step.dq.view();
    args.dk = step.dk.view();
    args.dv = step.dv.view();
    args.dsink = {};
    attend_backward(args, kernel());
    add(dq, step.dq);
    add(dk, step.dk);
    add(dv, step.dv);
  }
  Judge judge(dtype(), true);
  judge.close("dq", dq, want.dq, p.hq, p.dqk);
  judge.close("dk", dk, want.dk, p.hk, p.dqk);
  judge.close("dv", dv, want.dv, p.hk, p.dv);
}

// dout, and out as somebody kept it, may be of other dtypes than q, k and v: read as what they are, or refused.
TEST_P(KernelBackward, InputsOfAnyDType) {
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
      got.run(problem, kernel(), Pass::forward);
      out.set(got.forward.out.values());
      KernelBackwardArgs args = got.backward_args(problem);
      args.dout = dout.view();
      args.out = out.view();
      try {
        attend_backward(args, kernel());
      } catch (const Error& refused) {
        EXPECT_NE(std::string(refused.what()).find("dtype"), std::string::npos) << refused.what();
        EXPECT_FALSE(of_dout == dtype() && of_out == dtype()) << refused.what();
        continue;
      }
      Judge judge(dtype(), true);
      judge.backward(got.backward, want, p);
    }
  }
}

// A row with one key: the true gradient of its logit is zero, and what remains is the rounding of dout·v - dout·out;
// out is v bit for bit, so the two sums differ in order at most. dv is dout, summed over the heads of the group.
TEST_P(KernelBackward, OneKeyHasNoGradientOfTheLogit) {
  KernelProblem problem{
      "", {.tq = 300, .tk = 300, .hq = 2, .dqk = 33, .dv = 33, .dtype = dtype(), .slices = {{0, 200, 0, 300, 40, 40}}}};
  const AttentionProblem& p = problem.p;
  Random random(22);
  problem.p.fill(random);
  const Outputs got(p);
  got.run(problem, kernel(), Pass::backward);
  // |dout·v| <= 33·4; logits' slope 1 / sqrt(33); |k| <= 2; a sum of 33 terms in two orders.
  const double tiny = 2 * 33 * 0x1p-24 * 33 * 4 / std::sqrt(33.0) * 2;
  for (const double x : got.backward.dq.values()) ASSERT_LE(std::abs(x), tiny);
  for (const double x : got.backward.dk.values()) ASSERT_LE(std::abs(x), 2 * tiny);
  const std::vector<double> dv = got.backward.dv.values(), dout = problem.dout();
  for (Index row = 0; row < 200; ++row) {
    for (Index i = 0; i < p.dv; ++i) {
      const double want = dout[at(row * 2 * p.dv + i)] + dout[at((row * 2 + 1) * p.dv + i)];
      // lse is rounded to f32, so a share of 1 may be off by some units of it.
      ASSERT_NEAR(dv[at((row + 40) * p.dv + i)], want, check::rounding(dtype()).of(want) + 1e-5) << row << ", " << i;
    }
  }
}

// Queries of zero and values of dout that are whole: dv of key j is the sum over the rows that see it of dout / count.
TEST_P(KernelBackward, ZeroQueriesAtLargeSize) {
  const Index tokens = kSanitized ? 500 : 1800;
  KernelProblem problem{"",
                        {.tq = tokens,
                         .tk = tokens,
                         .hq = 2,
                         .hk = 1,
                         .dqk = 12,
                         .dv = 10,
                         .dtype = dtype(),
                         .slices = {{0, tokens, 0, tokens, -kUnlimited, 0}}}};
  AttentionProblem& p = problem.p;
  Random random(23);
  p.fill(random);
  p.q.set(std::vector<double>(at(p.tq * p.hq * p.dqk)));
  const Outputs got(p);
  got.run(problem, kernel(), Pass::backward);
  for (const double x : got.backward.dk.values()) ASSERT_EQ(x, 0);  // dS·q
  const std::vector<double> dv = got.backward.dv.values(), dout = p.dout.values();
  const double share = check::rounding(dtype()).relative;  // of P
  for (Index i = 0; i < p.dv; ++i) {
    double sum = 0, terms = 0;
    for (Index row = tokens - 1; row >= 0; --row) {
      for (Index head = 0; head < p.hq; ++head) {
        const double term = dout[at((row * p.hq + head) * p.dv + i)] / static_cast<double>(row + 1);
        sum += term;
        terms += std::abs(term);
      }
      ASSERT_NEAR(dv[at(row * p.dv + i)], sum, check::rounding(dtype()).of(sum) + (share + 2e-6) * terms)
          << "key " << row << ", " << i;
    }
  }
}

// A NaN that a row sees shows in all that depends on it, and in nothing else.
TEST_P(KernelBackward, ANanShows) {
  KernelProblem problem{"", {.tq = 40, .tk = 90, .hq = 1, .dtype = dtype()}};
  AttentionProblem& p = problem.p;
  p.slices = {{0, 20, 0, 40}, {20, 40, 40, 90}};
  Random random(25);
  p.fill(random);
  std::vector<double> q = p.q.values();
  q[at(7 * p.dqk)] = std::numeric_limits<double>::quiet_NaN();
  p.q.set(q);
  const Outputs got(p);
  got.run(problem, kernel(), Pass::backward);
  const std::vector<double> dq = got.backward.dq.values(), dk = got.backward.dk.values();
  for (Index row = 0; row < p.tq; ++row) EXPECT_EQ(std::isnan(dq[at(row * p.dqk)]), row == 7) << "row " << row;
  for (Index key = 0; key < p.tk; ++key) EXPECT_EQ(std::isnan(dk[at(key * p.dqk)]), key < 40) << "key " << key;
}

// The forward's results are read, not computed anew: one more in every lse is a factor of 1/e in every P.
TEST_P(KernelBackward, GivenLseIsUsed) {
  KernelProblem problem{"", {.tq = 40, .tk = 60, .dtype = dtype(), .slices = {{0, 40, 0, 60, -kUnlimited, 20}}}};
  Random random(24);
  problem.p.fill(random);
  Outputs got(problem.p);
  got.run(problem, kernel(), Pass::backward);
  const std::vector<double> before = got.backward.dv.values();
  std::vector<double> lse = got.forward.lse.values();
  for (double& x : lse) x += 1;
  got.forward.lse.set(lse);
  attend_backward(got.backward_args(problem), kernel());
  const std::vector<double> after = got.backward.dv.values();
  for (std::size_t i = 0; i < after.size(); ++i) {
    EXPECT_NEAR(after[i], before[i] / std::exp(1.0), 8 * check::rounding(dtype()).relative + 1e-5) << i;
  }
}

}  // namespace
}  // namespace weft::test
