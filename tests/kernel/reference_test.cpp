// The reference against the dense formula, to the last digits of f64. Answers known exactly, views, infinities and NaN:
// the suite over every kernel, of which it is one.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include <gtest/gtest.h>

#include "kernel/attention_problem.h"

namespace weft::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Short sums in another order: 30,000 problems stay below 40.
constexpr double kF64 = 64 * 0x1p-53;

AttentionProblem random_problem(Random& random) {
  AttentionProblem p;
  p.tq = random.index(0, 4) * 3;
  p.tk = random.index(0, 5) * 3;
  p.hk = random.index(1, 3);
  p.hq = p.hk * random.index(1, 3);
  p.dqk = random.index(1, 9);
  p.dv = random.index(1, 9);
  p.dtype = kDTypes[random.index(0, 3)];
  p.view = static_cast<ViewKind>(random.index(0, 3));
  if (random.chance(0.5)) p.scale = random.value();
  if (random.chance(0.3)) p.softcap = 0.1 + 3 * random.unit();
  p.sink = static_cast<Sink::Kind>(random.index(0, 2));
  p.slices = random_slices(random, p.tq, p.tk);
  p.fill(random);
  return p;
}

void expect_close(const Buffer& got, const check::Bounded& want, const std::string& what) {
  const check::Comparison c = check::worst_element(got.values(), want, got.view().heads, got.view().dim);
  EXPECT_LE(c.ratio, kF64) << what << " [" << c.row << ", " << c.head << ", " << c.i << "]: got " << c.got
                           << ", expected " << c.expected << ", bound " << c.bound;
}

TEST(Reference, AgreesWithTheDenseFormula) {
  Random random(1);
  std::map<std::string, int> met;
  for (int trial = 0; trial < 600; ++trial) {
    const AttentionProblem p = random_problem(random);
    const std::string what = "problem " + std::to_string(trial) + ", ";
    check::DenseProblem problem = p.dense();
    for (Index head = 0; trial % 3 == 0 && head < p.hq; ++head) problem.head_map.push_back(random.index(0, p.hk - 1));
    const Forward got(p);
    KernelForwardArgs args = got.args(p);
    args.attention.head_map = problem.head_map;
    reference_forward(args);
    const check::DenseForward want = check::dense_forward(problem);
    expect_close(got.out, want.out, what + "out");
    expect_close(got.lse, want.lse, what + "lse");
    expect_close(got.max_logit, want.max_logit, what + "max_logit");

    const Backward grad(p);
    KernelBackwardArgs back = grad.args(p);
    back.attention.head_map = problem.head_map;
    reference_backward(back);
    const check::DenseBackward dense = check::dense_backward(problem, p.dout.values());
    expect_close(grad.dq, dense.dq, what + "dq");
    expect_close(grad.dk, dense.dk, what + "dk");
    expect_close(grad.dv, dense.dv, what + "dv");
    if (p.sink == Sink::Kind::learnable) expect_close(grad.dsink, dense.dsink, what + "dsink");
    if (testing::Test::HasFailure()) break;

    const bool sees_some = std::count(p.q_used.begin(), p.q_used.end(), true) > 1;
    if (!sees_some) continue;
    ++met["dtype " + std::string(name(p.dtype))];
    ++met["view " + std::to_string(static_cast<int>(p.view))];
    ++met["sink " + std::to_string(static_cast<int>(p.sink))];
    met["softcap"] += p.softcap > 0;
    met["groups"] += p.hq > p.hk;
    met["head map"] += !problem.head_map.empty();
    met["dims"] += p.dqk != p.dv;
    met["rows that see nothing"] += std::count(p.q_used.begin(), p.q_used.end(), false) > 0;
  }
  EXPECT_EQ(met.size(), 4u + 4 + 3 + 5);
  for (const auto& [what, count] : met) EXPECT_GT(count, 50) << what;
}

TEST(Reference, OutputsAreRoundedOnce) {
  Random random(2);
  for (const DType dtype : kDTypes) {
    AttentionProblem p{.tq = 9, .tk = 9, .dtype = dtype, .slices = {{0, 9, 0, 9, -5, 2}}};
    p.fill(random);
    const Forward exact(p), rounded(p, dtype, DType::f32);
    reference_forward(exact.args(p));
    reference_forward(rounded.args(p));
    Buffer want(dtype, p.tq, p.hq, p.dv), lse(DType::f32, p.tq, p.hq, 1);
    want.set(exact.out.values());
    lse.set(exact.lse.values());
    EXPECT_EQ(rounded.out.values(), want.values());
    EXPECT_EQ(rounded.lse.values(), lse.values());
    const Backward exact_grad(p), rounded_grad(p, dtype);
    reference_backward(exact_grad.args(p));
    reference_backward(rounded_grad.args(p));
    Buffer dk(dtype, p.tk, p.hk, p.dqk);
    dk.set(exact_grad.dk.values());
    EXPECT_EQ(rounded_grad.dk.values(), dk.values());
  }
}

TEST(Reference, NothingToDo) {
  Random random(5);
  for (AttentionProblem p : {AttentionProblem{.tq = 0, .tk = 3}, AttentionProblem{.tq = 3, .tk = 0},
                             AttentionProblem{.tq = 3, .tk = 3, .slices = {{1, 1, 0, 3}, {0, 3, 2, 2}}}}) {
    p.fill(random);
    const Forward got(p);
    const Backward grad(p);
    reference_forward(got.args(p));
    reference_backward(grad.args(p));
    EXPECT_EQ(got.out.values(), std::vector<double>(at(p.tq * p.hq * p.dv)));
    EXPECT_EQ(got.lse.values(), std::vector<double>(at(p.tq * p.hq), -kInfinity));
    EXPECT_EQ(got.max_logit.values(), std::vector<double>(at(p.hq), -kInfinity));
    EXPECT_EQ(grad.dk.values(), std::vector<double>(at(p.tk * p.hk * p.dqk)));
  }
}

TEST(Reference, OptionalOutputsMayBeLeftOut) {
  Random random(6);
  AttentionProblem p{.slices = {{0, 6, 0, 6}}};
  p.fill(random);
  const Forward all(p), only(p);
  reference_forward(all.args(p));
  KernelForwardArgs args = only.args(p);
  args.lse = args.max_logit = {};
  reference_forward(args);
  EXPECT_EQ(only.out.values(), all.out.values());
  EXPECT_TRUE(std::isnan(only.lse.values()[0]));
}

// Keys in parts, in any order, merged step by step: a ring.
TEST(Reference, PartialStepsGiveTheWhole) {
  Random random(7);
  for (int trial = 0; trial < 60; ++trial) {
    AttentionProblem p = random_problem(random);
    const Forward whole(p), steps(p);
    reference_forward(whole.args(p));
    ReferenceState state(p.tq, p.hq, p.dv);
    const Index cut = p.tk == 0 ? 0 : random.index(0, p.tk);
    std::vector<Slice> parts[2];
    for (const Slice& s : p.slices) {
      Slice low = s, high = s;
      low.k_end = max_of(low.k_begin, min_of(s.k_end, cut));
      high.k_begin = min_of(high.k_end, max_of(s.k_begin, cut));
      parts[0].push_back(low);
      parts[1].push_back(high);
    }
    const std::size_t first = random.chance(0.5) ? 1 : 0;
    KernelForwardArgs args = steps.args(p);
    args.slices = parts[first];
    reference_partial(args, state);
    args.slices = parts[1 - first];
    reference_partial(args, state);
    reference_finish(state, args);
    const check::DenseForward want = check::dense_forward(p.dense());
    expect_close(steps.out, want.out, "out");
    expect_close(steps.lse, want.lse, "lse");
    EXPECT_EQ(steps.max_logit.values(), whole.max_logit.values());
  }
}

}  // namespace
}  // namespace weft::test
