// The reference's backward: finite differences of its forward, and steps over parts of the keys.
#include <cmath>
#include <functional>

#include <gtest/gtest.h>

#include "kernel/attention_problem.h"

namespace weft::test {
namespace {

// A causal band and a second document, padding between; every feature at once.
AttentionProblem small(Sink::Kind sink, double softcap) {
  return filled({.tq = 7, .tk = 8, .hq = 4, .hk = 2, .dqk = 3, .dv = 2, .scale = 0.7, .softcap = softcap, .sink = sink},
                {{0, 3, 0, 4, -kUnlimited, 1}, {4, 7, 5, 8, -1, 2}}, 21);
}

double loss(const AttentionProblem& p) {
  const Forward forward(p);
  reference_forward(forward.args(p));
  const std::vector<double> out = forward.out.values(), dout = p.dout.values();
  double sum = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (p.q_used[i / at(p.hq * p.dv)]) sum += out[i] * dout[i];
  }
  return sum;
}

// Central differences of the loss by every element of `input`, beside what the backward says.
void expect_slope(AttentionProblem& p, Buffer& input, const std::vector<double>& gradient, const std::string& what) {
  const double step = 1e-5;
  const std::vector<double> values = input.values();
  int moved = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(values[i])) {
      EXPECT_EQ(gradient[i], 0) << what << " " << i << " is padding";
      continue;
    }
    std::vector<double> shifted = values;
    shifted[i] = values[i] + step;
    input.set(shifted);
    const double above = loss(p);
    shifted[i] = values[i] - step;
    input.set(shifted);
    const double slope = (above - loss(p)) / (2 * step);
    EXPECT_NEAR(gradient[i], slope, 1e-8 + 1e-7 * std::abs(slope)) << what << " " << i;
    moved += std::abs(slope) > 1e-3;
  }
  input.set(values);
  EXPECT_GT(moved, static_cast<int>(values.size()) / 3) << what;  // most of it must be more than zeros
}

TEST(Gradient, FiniteDifferences) {
  for (const Sink::Kind sink : {Sink::Kind::none, Sink::Kind::off_by_one, Sink::Kind::learnable}) {
    for (const double softcap : {0.0, 1.5}) {
      AttentionProblem p = small(sink, softcap);
      const Backward grad(p);
      reference_backward(grad.args(p));
      expect_slope(p, p.q, grad.dq.values(), "dq");
      expect_slope(p, p.k, grad.dk.values(), "dk");
      expect_slope(p, p.v, grad.dv.values(), "dv");
      if (sink == Sink::Kind::learnable) expect_slope(p, p.sink_logits, grad.dsink.values(), "dsink");
    }
  }
}

void expect_all_near(const std::vector<double>& got, const std::vector<double>& want, double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], tolerance) << i;
}

// With the whole row's out and lse, each part of the keys gives its share.
TEST(Gradient, PartsOfTheKeysAddUp) {
  AttentionProblem p = small(Sink::Kind::learnable, 1.5);
  const Forward forward(p);
  reference_forward(forward.args(p));
  const Backward whole(p);
  reference_backward(whole.args(p));
  std::vector<double> dq(at(p.tq * p.hq * p.dqk)), dk(at(p.tk * p.hk * p.dqk)), dv(at(p.tk * p.hk * p.dv));
  const std::vector<std::vector<Slice>> parts = {{{0, 3, 0, 2, -kUnlimited, 1}, {4, 7, 6, 8, -1, 2}},
                                                 {{0, 3, 2, 4, -kUnlimited, 1}, {4, 7, 5, 6, -1, 2}}};
  for (const std::vector<Slice>& part : parts) {
    const Backward step(p);
    KernelBackwardArgs args = step.args(p);
    args.slices = part;
    args.out = forward.out.view();
    args.lse = forward.lse.view();
    reference_backward(args);
    const std::vector<double> q = step.dq.values(), k = step.dk.values(), v = step.dv.values();
    for (std::size_t i = 0; i < q.size(); ++i) dq[i] += q[i];
    for (std::size_t i = 0; i < k.size(); ++i) dk[i] += k[i];
    for (std::size_t i = 0; i < v.size(); ++i) dv[i] += v[i];
  }
  expect_all_near(dq, whole.dq.values(), 1e-14);
  expect_all_near(dk, whole.dk.values(), 1e-14);
  expect_all_near(dv, whole.dv.values(), 1e-14);
}

TEST(Gradient, GivenOutAndLseAreUsed) {
  const AttentionProblem p = small(Sink::Kind::learnable, 0);
  Forward forward(p);
  reference_forward(forward.args(p));
  const Backward anew(p), given(p), other(p);
  reference_backward(anew.args(p));
  KernelBackwardArgs args = given.args(p);
  args.out = forward.out.view();
  args.lse = forward.lse.view();
  reference_backward(args);
  EXPECT_EQ(given.dq.values(), anew.dq.values());
  EXPECT_EQ(given.dsink.values(), anew.dsink.values());
  // One more in every lse is a factor of 1/e in every P.
  std::vector<double> lse = forward.lse.values();
  for (double& x : lse) x += 1;
  forward.lse.set(lse);
  args.dv = other.dv.view();
  reference_backward(args);
  std::vector<double> want = anew.dv.values();
  for (double& x : want) x /= std::exp(1.0);
  expect_all_near(other.dv.values(), want, 1e-14);
}

// A row with one key: its output does not depend on q or k, so the true gradient is zero.
TEST(Gradient, OneKeyHasNoGradientOfTheLogit) {
  const AttentionProblem p = filled({.tq = 4, .tk = 4}, {{0, 4, 0, 4, 0, 0}}, 22);
  const Backward grad(p);
  reference_backward(grad.args(p));
  expect_all_near(grad.dq.values(), std::vector<double>(at(4 * p.hq * p.dqk)), 1e-14);
  expect_all_near(grad.dk.values(), std::vector<double>(at(4 * p.hk * p.dqk)), 1e-14);
  EXPECT_NE(grad.dv.values()[0], 0);
}

}  // namespace
}  // namespace weft::test
