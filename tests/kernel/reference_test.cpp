// The reference's forward against the dense formula and against answers known exactly.
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
    const Forward got(p);
    reference_forward(got.args(p));
    const check::DenseForward want = check::dense_forward(p.dense());
    expect_close(got.out, want.out, what + "out");
    expect_close(got.lse, want.lse, what + "lse");
    expect_close(got.max_logit, want.max_logit, what + "max_logit");

    const Backward grad(p);
    reference_backward(grad.args(p));
    const check::DenseBackward dense = check::dense_backward(p.dense(), p.dout.values());
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
    met["dims"] += p.dqk != p.dv;
    met["rows that see nothing"] += std::count(p.q_used.begin(), p.q_used.end(), false) > 0;
  }
  EXPECT_EQ(met.size(), 4u + 4 + 3 + 4);
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

// Queries of zero: the output is the mean of the visible values, and the LSE is the log of their number.
TEST(Reference, ZeroQueriesGiveMeans) {
  Random random(3);
  AttentionProblem p{.tq = 8, .tk = 8, .hq = 1, .dv = 1, .slices = {{0, 8, 0, 8, -2, 0}}};
  p.fill(random);
  p.q.set(std::vector<double>(at(8 * p.dqk)));
  p.v.set({1, 2, 4, 8, 16, 32, 64, 128});
  const Forward got(p);
  reference_forward(got.args(p));
  const std::vector<double> out = got.out.values(), lse = got.lse.values();
  EXPECT_EQ(out[0], 1);
  EXPECT_EQ(out[1], 1.5);
  for (std::size_t i = 2; i < 8; ++i) {
    EXPECT_DOUBLE_EQ(out[i], std::ldexp(7, static_cast<int>(i) - 2) / 3);
    EXPECT_DOUBLE_EQ(lse[i], std::log(3.0));
  }
  EXPECT_EQ(lse[0], 0);
  EXPECT_EQ(got.max_logit.values()[0], 0);
}

TEST(Reference, RowsThatSeeNothing) {
  Random random(4);
  AttentionProblem p{.tq = 6, .tk = 6, .sink = Sink::Kind::none, .slices = {{2, 4, 1, 3}}};
  for (const Sink::Kind sink : {Sink::Kind::none, Sink::Kind::off_by_one, Sink::Kind::learnable}) {
    p.sink = sink;
    p.fill(random);
    const Forward got(p);
    const Backward grad(p);
    reference_forward(got.args(p));
    reference_backward(grad.args(p));
    const std::vector<double> out = got.out.values(), lse = got.lse.values(), sinks = p.sink_logits.values();
    for (const Index row : {0, 1, 4, 5}) {
      for (Index head = 0; head < p.hq; ++head) {
        const double want = sink == Sink::Kind::none         ? -kInfinity
                            : sink == Sink::Kind::off_by_one ? 0
                                                             : sinks[at(head)];
        EXPECT_EQ(lse[at(row * p.hq + head)], want);
        for (Index i = 0; i < p.dv; ++i) EXPECT_EQ(out[at((row * p.hq + head) * p.dv + i)], 0);
        for (Index i = 0; i < p.dqk; ++i) EXPECT_EQ(grad.dq.values()[at((row * p.hq + head) * p.dqk + i)], 0);
      }
    }
    for (const Index key : {0, 3, 4, 5}) {
      for (Index i = 0; i < p.dqk; ++i) EXPECT_EQ(grad.dk.values()[at(key * p.dqk + i)], 0);
      for (Index i = 0; i < p.dv; ++i) EXPECT_EQ(grad.dv.values()[at(key * p.dv + i)], 0);
    }
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

TEST(Reference, HeadMapNamesTheKeyHead) {
  Random random(8);
  AttentionProblem p{.hq = 3, .hk = 2, .slices = {{0, 6, 0, 6, -kUnlimited, 0}}};
  p.fill(random);
  const std::vector<Index> map = {1, 0, 1};
  const Forward got(p);
  KernelForwardArgs args = got.args(p);
  args.attention.head_map = map;
  reference_forward(args);
  check::DenseProblem dense = p.dense();
  dense.head_map = map;
  expect_close(got.out, check::dense_forward(dense).out, "out");
  const Backward grad(p);
  KernelBackwardArgs back = grad.args(p);
  back.attention.head_map = map;
  reference_backward(back);
  expect_close(grad.dk, check::dense_backward(dense, p.dout.values()).dk, "dk");
}

TEST(Reference, InterleavedViewsGiveTheSameBits) {
  Random random(9);
  AttentionProblem p{.hq = 2, .hk = 2, .slices = {{0, 6, 0, 6, -3, 0}}};
  p.fill(random);
  const Forward plain(p);
  reference_forward(plain.args(p));
  Buffer by_heads(DType::f64, p.tq, 3 * p.hq, p.dqk), by_dim(DType::f64, p.tq, p.hq, 3 * p.dqk);
  for (const auto& fused : {qkv_3hd(by_heads.view(), p.hq, p.hk), qkv_h3d(by_dim.view())}) {
    from_f64(p.q.values(), fused.q);
    from_f64(p.k.values(), fused.k);
    from_f64(p.v.values(), fused.v);
    const Forward got(p);
    KernelForwardArgs args = got.args(p);
    read_from(args, fused.q, fused.k, fused.v);
    reference_forward(args);
    EXPECT_EQ(got.out.values(), plain.out.values());
    EXPECT_EQ(got.lse.values(), plain.lse.values());
  }
}

TEST(Reference, HugeLogitsDoNotOverflowAndANanShows) {
  AttentionProblem p{.tq = 1, .tk = 2, .hq = 1, .dqk = 1, .dv = 1, .scale = 1.0, .slices = {{0, 1, 0, 2}}};
  Random random(10);
  p.fill(random);
  p.q.set({1e150});
  p.k.set({1e150, -1e150});
  p.v.set({3, 4});
  const Forward got(p);
  reference_forward(got.args(p));
  EXPECT_EQ(got.out.values()[0], 3);
  EXPECT_EQ(got.lse.values()[0], 1e150 * 1e150);
  p.k.set({1, std::nan("")});
  reference_forward(got.args(p));
  EXPECT_TRUE(std::isnan(got.out.values()[0]));
  EXPECT_TRUE(std::isnan(got.lse.values()[0]));
  EXPECT_TRUE(std::isnan(got.max_logit.values()[0]));
}

}  // namespace
}  // namespace weft::test
