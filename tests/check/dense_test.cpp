// The oracle itself, on answers worked out by hand.
#include "check/dense.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "index.h"

namespace weft::check {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double kNan = std::nan("");

// Two queries and three keys, width 1. Query 0 sees keys 0 and 1 with logits 0 and ln 3; query 1 sees nothing.
DenseProblem small() {
  DenseProblem p{.tokens_q = 2, .tokens_k = 3};
  p.q = {2, kNan};
  p.k = {0, std::log(3.0), kNan};
  p.v = {8, 4, kNan};
  p.sees = [](Index q, Index k) { return q == 0 && k < 2; };
  p.scale = 0.5;
  return p;
}

TEST(Dense, ForwardByHand) {
  const DenseForward f = dense_forward(small());
  EXPECT_NEAR(f.out.value[0], 0.25 * 8 + 0.75 * 4, 1e-15);
  EXPECT_NEAR(f.lse.value[0], std::log(4.0), 1e-15);
  EXPECT_EQ(f.out.value[1], 0);
  EXPECT_EQ(f.out.bound[1], 0);
  EXPECT_EQ(f.lse.value[1], -kInfinity);
  EXPECT_EQ(f.max_logit.value[0], 0.5 * 2 * std::log(3.0));
}

TEST(Dense, SinkByHand) {
  DenseProblem p = small();
  p.sink = {std::log(4.0)};  // takes half
  const DenseForward f = dense_forward(p);
  EXPECT_NEAR(f.out.value[0], 0.125 * 8 + 0.375 * 4, 1e-15);
  EXPECT_NEAR(f.lse.value[0], std::log(8.0), 1e-15);
  EXPECT_EQ(f.lse.value[1], std::log(4.0));
  EXPECT_EQ(f.max_logit.value[0], std::log(3.0));
  // d out / d sink = -P_sink·out.
  EXPECT_NEAR(dense_backward(p, std::vector<double>{1, kNan}).dsink.value[0], -0.5 * 2.5, 1e-15);
}

TEST(Dense, SoftcapByHand) {
  DenseProblem p = small();
  p.softcap = 2;
  EXPECT_NEAR(dense_forward(p).max_logit.value[0], 2 * std::tanh(std::log(3.0) / 2), 1e-15);  // tanh(ln(3)/2) = 1/2
  EXPECT_NEAR(dense_forward(p).max_logit.value[0], 1, 1e-15);
}

TEST(Dense, BackwardByHand) {
  const std::vector<double> dout = {1, kNan};
  const DenseBackward b = dense_backward(small(), dout);
  // P = (1/4, 3/4), dP = (8, 4), mean 5: dS = (3/4, -3/4).
  EXPECT_NEAR(b.dv.value[0], 0.25, 1e-15);
  EXPECT_NEAR(b.dv.value[1], 0.75, 1e-15);
  EXPECT_EQ(b.dv.value[2], 0);
  EXPECT_NEAR(b.dq.value[0], 0.5 * -0.75 * std::log(3.0), 1e-15);
  EXPECT_EQ(b.dq.value[1], 0);
  EXPECT_NEAR(b.dk.value[0], 0.5 * 0.75 * 2, 1e-15);
  EXPECT_NEAR(b.dk.value[1], 0.5 * -0.75 * 2, 1e-15);
  EXPECT_EQ(b.dk.value[2], 0);
  EXPECT_EQ(b.dsink.value[0], 0);
}

TEST(Dense, HeadsInGroupsAndByMap) {
  DenseProblem p{.tokens_q = 1, .tokens_k = 1, .heads_q = 4, .heads_k = 2};
  p.q = {1, 1, 1, 1};
  p.k = {1, 1};
  p.v = {5, 7};
  p.sees = [](Index, Index) { return true; };
  EXPECT_EQ(dense_forward(p).out.value, (std::vector<double>{5, 5, 7, 7}));
  p.head_map = {1, 0, 0, 1};
  EXPECT_EQ(dense_forward(p).out.value, (std::vector<double>{7, 5, 5, 7}));
}

// A bound must hold a true error: perturb each input by one part in 2^20 and see that no element moves by much more.
TEST(Dense, BoundsHoldWhatRoundingDoes) {
  DenseProblem p{.tokens_q = 3, .tokens_k = 4, .heads_q = 2, .heads_k = 1, .dim_qk = 3, .dim_v = 2};
  const auto fill = [](Index size, double phase) {
    std::vector<double> values(at(size));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = 3 * std::sin(phase + 1.7 * static_cast<double>(i));
    return values;
  };
  p.q = fill(18, 0.1);
  p.k = fill(12, 0.2);
  p.v = fill(8, 0.3);
  p.scale = 0.3;
  p.softcap = 5;
  p.sink = {0.5, -1};
  p.sees = [](Index q, Index k) { return k <= q + 1; };
  const std::vector<double> dout = fill(12, 0.4);
  const double unit = 0x1p-20;
  DenseProblem moved = p;
  for (std::size_t i = 0; i < p.q.size(); ++i) moved.q[i] *= 1 + (i % 2 == 0 ? unit : -unit);
  for (std::size_t i = 0; i < p.v.size(); ++i) moved.v[i] *= 1 + (i % 3 == 0 ? unit : -unit);
  const DenseForward f = dense_forward(p), mf = dense_forward(moved);
  const DenseBackward b = dense_backward(p, dout), mb = dense_backward(moved, dout);
  const auto within = [&](const Bounded& got, const Bounded& want, Index dim) {
    const double ratio = worst_element(got.value, want, 1, dim).ratio;
    EXPECT_LT(ratio, 1.01 * unit);
    EXPECT_GT(ratio, unit / 100);  // and is not idle
  };
  within(mf.out, f.out, 2);
  within(mf.lse, f.lse, 1);
  within(mf.max_logit, f.max_logit, 1);
  within(mb.dq, b.dq, 3);
  within(mb.dk, b.dk, 3);
  within(mb.dv, b.dv, 2);
  within(mb.dsink, b.dsink, 1);
}

TEST(WorstElement, NamesTheWorstByItsBound) {
  Bounded want{std::vector<double>(12, 1.0), std::vector<double>(12, 1.0)};
  want.bound[7] = 0.01;
  std::vector<double> got = want.value;
  got[3] = 1.5;
  got[7] = 1.1;
  const Comparison c = worst_element(got, want, 2, 3);
  EXPECT_NEAR(c.ratio, 10, 1e-12);
  EXPECT_EQ(c.row, 1);
  EXPECT_EQ(c.head, 0);
  EXPECT_EQ(c.i, 1);
  EXPECT_EQ(c.got, 1.1);
  EXPECT_NEAR(c.relative_norm, std::sqrt((0.25 + 0.01) / 12), 1e-12);
}

TEST(WorstElement, Edges) {
  const Bounded want{{0, -kInfinity, 2}, {0, 0, 1}};
  EXPECT_EQ(worst_element(std::vector<double>{0, -kInfinity, 2}, want, 1, 1).ratio, 0);
  EXPECT_EQ(worst_element(std::vector<double>{1e-300, -kInfinity, 2}, want, 1, 1).ratio, kInfinity);
  EXPECT_EQ(worst_element(std::vector<double>{0, 5, 2}, want, 1, 1).row, 1);
  EXPECT_EQ(worst_element(std::vector<double>{0, 5, 2}, want, 1, 1).ratio, kInfinity);
  EXPECT_EQ(worst_element(std::vector<double>{0, -kInfinity, kNan}, want, 1, 1).ratio, kInfinity);
  EXPECT_EQ(worst_element(std::vector<double>{0, -kInfinity, kInfinity}, want, 1, 1).ratio, kInfinity);
  EXPECT_EQ(worst_element(std::vector<double>{0}, want, 1, 1).ratio, kInfinity);
  EXPECT_EQ(worst_element({}, {}, 1, 1).ratio, 0);
}

}  // namespace
}  // namespace weft::check
