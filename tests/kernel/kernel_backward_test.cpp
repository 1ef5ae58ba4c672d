// Every kernel's backward against the dense formula, at once and in parts of the keys, and against answers known
// exactly.
#include <cmath>
#include <cstdlib>
#include <limits>

#include <gtest/gtest.h>

#include "kernel/kernel_features.h"
#include "kernel/key_parts.h"
#include "refusal.h"

namespace weft::test {
namespace {

class KernelBackward : public BackwardKernelTest {
 protected:
  void expect_all(MakeProblems make, bool each_norm) {
    for (const bool deterministic : {false, true}) {
      if (deterministic && !on_gpu()) continue;  // CPU kernels always are
      Judge judge(dtype(), each_norm);
      int n = 0;
      for (const Judged& j : judged(dtype(), Pass::backward, make)) {
        SCOPED_TRACE(j.problem.name + (deterministic ? ", deterministic" : ""));
        const Outputs got(j.problem.p, n++ % 2 == 0 ? DType::f32 : DType::f64);
        got.run(j.problem, kernel(), Pass::backward, deterministic);
        judge.backward(got.backward, j.want, j.problem.p);
      }
    }
  }
  void expect_parts_add_up(Index dqk, Index dv, bool add_keys);
};
WEFT_FOR_EACH_KERNEL(KernelBackward);

TEST_P(KernelBackward, EveryFeature) { expect_all(feature_problems, true); }
TEST_P(KernelBackward, RandomPlans) { expect_all(planned_problems, false); }
TEST_P(KernelBackward, Wide) { expect_all(wide_problems, true); }
TEST_P(KernelBackward, HeadDimsAbove256) {
  if (const auto reason = refusal({.pass = Pass::backward, .dim_qk = 576, .dim_v = 512})) GTEST_SKIP() << *reason;
  expect_all(problems_above_256, true);
}

// Both passes on random problems: WEFT_KERNEL_PROBLEMS of them, from the seed WEFT_KERNEL_SEED on.
TEST_P(KernelBackward, RandomProblems) {
  const char* asked = std::getenv("WEFT_KERNEL_PROBLEMS");
  const int problems = asked != nullptr ? std::atoi(asked) : on_gpu() ? 60 : 12;
  const char* from = std::getenv("WEFT_KERNEL_SEED");
  const unsigned first = from != nullptr ? static_cast<unsigned>(std::atoi(from)) : 1000;
  const bool above_256 = !refusal({.pass = Pass::backward, .dim_qk = 576, .dim_v = 512});
  Judge plain(dtype(), false), steep(dtype(), false, false);
  for (int i = 0; i < problems; ++i) {
    Random random(first + static_cast<unsigned>(i));
    const KernelProblem problem = random_problem(random, dtype(), above_256);
    const AttentionProblem& p = problem.p;
    SCOPED_TRACE("problem " + std::to_string(first) + " + " + std::to_string(i) + ": rows " + std::to_string(p.tq) +
                 ", keys " + std::to_string(p.tk) + ", dims " + std::to_string(p.dqk) + ":" + std::to_string(p.dv));
    const Outputs got(p);
    got.run(problem, kernel(), Pass::backward, i % 3 == 0);
    const check::Expected want = expected_of(problem, Pass::backward);
    Judge& judge = std::abs(p.scale.value_or(0)) * std::sqrt(static_cast<double>(p.dqk)) > 2 ? steep : plain;
    judge.forward(got.forward, want, p);
    judge.backward(got.backward, want, p);
    if (HasFailure()) break;
  }
}

// The forward's results may be left out; they are then computed anew.
TEST_P(KernelBackward, OutAndLseMayBeLeftOut) {
  Judge judge(dtype(), false);
  for (const MakeProblems make : fewer_if_sanitized<MakeProblems>({wide_problems, feature_problems}, 1)) {
    for (const Judged& j : judged(dtype(), Pass::backward, make)) {
      SCOPED_TRACE(j.problem.name);
      const Outputs got(j.problem.p);
      KernelBackwardArgs args = got.backward_args(j.problem);
      args.out = args.lse = {};
      attend_backward_on(kernel(), args);
      judge.backward(got.backward, j.want, j.problem.p);
    }
  }
}

// With the whole row's out and lse, dq of each part of the keys adds up; gradients in f32, as a ring sums them. dk and
// dv are those of the part's keys, and with add_keys are added to what is there.
void KernelBackward::expect_parts_add_up(Index dqk, Index dv, bool add_keys) {
  SCOPED_TRACE("dims " + std::to_string(dqk) + ":" + std::to_string(dv) + (add_keys ? ", added in place" : ""));
  const AttentionProblem base{
      .tq = 70, .tk = 131, .hq = 4, .hk = 2, .dqk = dqk, .dv = dv, .dtype = dtype(), .sink = Sink::Kind::learnable};
  const KernelProblem problem = make_problem(base, {{0, 50, 0, 100, -kUnlimited, 45}, {55, 70, 90, 131, -30, 60}}, 21);
  const AttentionProblem& p = problem.p;
  const Outputs whole(p);
  attend_on(kernel(), whole.forward_args(problem));
  const check::Expected want =
      check::expected(problem.dense(), problem.dout(), check::kernel_arithmetic(dtype(), DType::f32));
  Backward step(p, DType::f32);
  std::vector<double> zeros_dk(at(p.tk * p.hk * p.dqk)), zeros_dv(at(p.tk * p.hk * p.dv));
  std::vector<double> sum_dq(at(p.tq * p.hq * p.dqk)), sum_dk = zeros_dk, sum_dv = zeros_dv;
  const auto add = [](std::vector<double>& to, const Buffer& part) {
    const std::vector<double> values = part.values();
    for (std::size_t i = 0; i < to.size(); ++i) to[i] += values[i];
  };
  step.dk.set(zeros_dk);
  step.dv.set(zeros_dv);
  for (const Range keys : {Range{64, 131}, Range{0, 1}, Range{1, 64}}) {
    const std::vector<Slice> part = keys_of(p.slices, keys);
    if (!add_keys) step = Backward(p, DType::f32);
    KernelBackwardArgs args = whole.backward_args(problem);
    args.slices = part;
    write_to(args, step.dq.view(), step.dk.view(), step.dv.view());
    args.add_keys = add_keys;
    args.dsink = {};
    attend_backward_on(kernel(), args);
    add(sum_dq, step.dq);
    if (add_keys) continue;
    add(sum_dk, step.dk);
    add(sum_dv, step.dv);
  }
  Judge judge(dtype(), true);
  judge.close("dq", sum_dq, want.dq, p.hq, p.dqk);
  judge.close("dk", add_keys ? step.dk.values() : sum_dk, want.dk, p.hk, p.dqk);
  judge.close("dv", add_keys ? step.dv.values() : sum_dv, want.dv, p.hk, p.dv);
}
TEST_P(KernelBackward, PartsOfTheKeysAddUp) {
  using Dims = std::pair<Index, Index>;
  for (const auto& [dqk, dv] : fewer_if_sanitized<Dims>({{24, 24}, {192, 128}, {256, 256}, {576, 512}}, 1)) {
    if (refusal({.pass = Pass::backward, .dim_qk = dqk, .dim_v = dv})) continue;
    for (const bool add_keys : {false, true}) expect_parts_add_up(dqk, dv, add_keys);
  }
}

// With add_keys, keys that nobody sees keep what they have, bit for bit, and so do K/V heads that nobody uses.
TEST_P(KernelBackward, AddingLeavesOtherKeysAlone) {
  KernelProblem problem = make_problem({.tq = 40, .tk = 90, .hq = 2, .hk = 2, .dtype = dtype()}, {{0, 40, 10, 30}}, 27);
  problem.head_map = {1, 1};
  const AttentionProblem& p = problem.p;
  const Outputs got(p);
  attend_on(kernel(), got.forward_args(problem));
  const Backward sums(p, DType::f32);  // NaN, every byte 0xff
  KernelBackwardArgs args = got.backward_args(problem);
  args.dk = sums.dk.view();
  args.dv = sums.dv.view();
  args.add_keys = true;
  attend_backward_on(kernel(), args);
  const auto all_ones = [](const Buffer& b, Index row, Index head) {
    return static_cast<const unsigned*>(b.view().data)[b.view().offset(row, head)] == 0xffffffffu;
  };
  for (Index row = 0; row < p.tk; ++row)
    for (Index head = 0; head < 2; ++head) {
      if (head == 1 && row >= 10 && row < 30) continue;
      EXPECT_TRUE(all_ones(sums.dk, row, head)) << row << ", " << head;
      EXPECT_TRUE(all_ones(sums.dv, row, head)) << row << ", " << head;
    }
}

// dout, and the forward's out, may be of other dtypes than q, k and v: read as what they are, or refused.
TEST_P(KernelBackward, InputsOfAnyDType) {
  const KernelProblem problem =
      make_problem({.tq = 30, .tk = 45, .dqk = 16, .dv = 16, .dtype = dtype()}, {{0, 28, 2, 45, -kUnlimited, 15}}, 26);
  const AttentionProblem& p = problem.p;
  Random random(26);
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
      if (const std::string refused = error_of([&] { attend_backward_on(kernel(), args); }); !refused.empty()) {
        expect_parts(refused, {"dtype"});
        EXPECT_FALSE(on_gpu() || (of_dout == dtype() && of_out == dtype())) << refused;
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
  const KernelProblem problem = make_problem({.tq = 300, .tk = 300, .hq = 2, .dqk = 33, .dv = 33, .dtype = dtype()},
                                             {{0, 200, 0, 300, 40, 40}}, 22);
  const AttentionProblem& p = problem.p;
  const Outputs got(p);
  got.run(problem, kernel(), Pass::backward);
  // |dout·v| <= 33·4; logits' slope 1 / sqrt(33); |k| <= 2; a sum of 33 terms in two orders, one of them
  // truncated on a GPU.
  const double tiny = (on_gpu() ? 4 : 2) * 33 * 0x1p-24 * 33 * 4 / std::sqrt(33.0) * 2;
  for (const double x : got.backward.dq.values()) ASSERT_LE(std::abs(x), tiny);
  for (const double x : got.backward.dk.values()) ASSERT_LE(std::abs(x), 2 * tiny);
  const std::vector<double> dv = got.backward.dv.values(), dout = problem.dout();
  for (Index row = 0; row < 200; ++row) {
    for (Index i = 0; i < p.dv; ++i) {
      const double want = dout[at(row * 2 * p.dv + i)] + dout[at((row * 2 + 1) * p.dv + i)];
      // lse is rounded to f32, so a probability of 1 may be off by some units of it.
      ASSERT_NEAR(dv[at((row + 40) * p.dv + i)], want, check::rounding(dtype()).of(want) + 1e-5) << row << ", " << i;
    }
  }
}

// Queries of zero and values of dout that are whole: dv of key j is the sum over the rows that see it of dout / count.
TEST_P(KernelBackward, ZeroQueriesAtLargeSize) {
  const Index tokens = kSanitized ? 500 : 1800;
  KernelProblem problem =
      make_problem({.tq = tokens, .tk = tokens, .hq = 2, .hk = 1, .dqk = 12, .dv = 10, .dtype = dtype()},
                   {{0, tokens, 0, tokens, -kUnlimited, 0}}, 23);
  AttentionProblem& p = problem.p;
  p.q.set(std::vector<double>(at(p.tq * p.hq * p.dqk)));
  const Outputs got(p);
  got.run(problem, kernel(), Pass::backward);
  for (const double x : got.backward.dk.values()) ASSERT_EQ(x, 0);  // dS·q
  const std::vector<double> dv = got.backward.dv.values(), dout = p.dout.values();
  const double rounded_p = check::rounding(dtype()).relative;
  for (Index i = 0; i < p.dv; ++i) {
    double sum = 0, terms = 0;
    for (Index row = tokens - 1; row >= 0; --row) {
      for (Index head = 0; head < p.hq; ++head) {
        const double term = dout[at((row * p.hq + head) * p.dv + i)] / static_cast<double>(row + 1);
        sum += term;
        terms += std::abs(term);
      }
      ASSERT_NEAR(dv[at(row * p.dv + i)], sum, check::rounding(dtype()).of(sum) + (rounded_p + 2e-6) * terms)
          << "key " << row << ", " << i;
    }
  }
}

// A NaN that a row sees shows in all that depends on it, and in nothing else; on a GPU, rows and keys of the same tile
// may show it too.
TEST_P(KernelBackward, ANanShows) {
  const Index tokens = on_gpu() ? 400 : 90, second = on_gpu() ? 200 : 20;
  KernelProblem problem = make_problem({.tq = tokens, .tk = tokens, .hq = 1, .dtype = dtype()},
                                       {{0, 20, 0, 40}, {second, tokens, max_of(second, 40), tokens}}, 25);
  AttentionProblem& p = problem.p;
  std::vector<double> q = p.q.values();
  q[at(7 * p.dqk)] = std::numeric_limits<double>::quiet_NaN();
  p.q.set(q);
  const Outputs got(p);
  got.run(problem, kernel(), Pass::backward);
  const std::vector<double> dq = got.backward.dq.values(), dk = got.backward.dk.values();
  for (Index row = 0; row < tokens; ++row) {
    if (row != 7 && row < 40 && on_gpu()) continue;
    EXPECT_EQ(std::isnan(dq[at(row * p.dqk)]), row == 7) << "row " << row;
  }
  for (Index key = 0; key < tokens; ++key) EXPECT_EQ(std::isnan(dk[at(key * p.dqk)]), key < 40) << "key " << key;
}

// The forward's results are read, not computed anew: one more in every lse is a factor of 1/e in every P.
TEST_P(KernelBackward, GivenLseIsUsed) {
  const KernelProblem problem =
      make_problem({.tq = 40, .tk = 60, .dtype = dtype()}, {{0, 40, 0, 60, -kUnlimited, 20}}, 24);
  Outputs got(problem.p);
  got.run(problem, kernel(), Pass::backward);
  const std::vector<double> before = got.backward.dv.values();
  std::vector<double> lse = got.forward.lse.values();
  for (double& x : lse) x += 1;
  got.forward.lse.set(lse);
  attend_backward_on(kernel(), got.backward_args(problem));
  const std::vector<double> after = got.backward.dv.values();
  for (std::size_t i = 0; i < after.size(); ++i) {
    EXPECT_NEAR(after[i], before[i] / std::exp(1.0), 8 * check::rounding(dtype()).relative + 1e-5) << i;
  }
}

}  // namespace
}  // namespace weft::test
