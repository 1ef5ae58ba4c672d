// The reference's backward: finite differences of its forward. More of it: the suite over every kernel.
#include <cmath>

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

}  // namespace
}  // namespace weft::test
