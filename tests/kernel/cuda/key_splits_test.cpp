// Keys in parts: rows of few heads that see many, against the dense formula, with every feature, from slices on the
// host and from a plan on the device.
#include "kernel/cuda/gpu_problem.h"
#include "kernel/query_cuts.h"
#include "run/cuda/graph_rank.h"

namespace weft::test {
namespace {

using GpuKeySplits = GpuTest;
WEFT_FOR_SM90(GpuKeySplits);

// Rows that see many parts, one, part of one, none; slices of which one has no keys in parts that another has; a window
// that leaves parts out between two.
std::vector<Slice> slices_of_parts() {
  return {{0, 130, 0, 1000},  {130, 260, 10, 1000, -kUnlimited, 600},
          {260, 270, 3, 100}, {270, 300, 500, 1000, -100, 400},
          {270, 300, 0, 90},  {305, 340, 100, 900, 300, 700}};
}
KernelProblem problem_of_parts(DType dtype, Index width, Index heads_k, Random& random) {
  AttentionProblem p{.tq = 350, .tk = 1000, .hq = 2 * heads_k, .hk = heads_k, .dqk = width, .dtype = dtype};
  p.dv = width == 192 ? 128 : width;
  p.slices = slices_of_parts();
  p.sink = static_cast<Sink::Kind>(random.index(0, 2));
  if (random.chance(0.3)) p.softcap = 2;
  p.fill(random);
  return {"", std::move(p)};
}

// With the features that a kernel of its own has, and without them.
TEST_P(GpuKeySplits, GiveTheWhole) {
  Judge judge(dtype(), false);
  Random random(51);
  for (const Index width : {40, 64, 128, 192, 256}) {
    for (const Index heads_k : {1, 2}) {  // many, and one after another: below
      KernelProblem problem = problem_of_parts(dtype(), width, heads_k, random);
      const AttentionProblem& p = problem.p;
      const check::Expected want = expected_of(problem, Pass::forward);
      for (const Index keys_per_split : {1, 256, 640}) {  // in whole tiles of keys
        SCOPED_TRACE("width " + std::to_string(width) + ", " + std::to_string(heads_k) + " heads, parts of " +
                     std::to_string(keys_per_split));
        problem.keys_per_split = keys_per_split;
        const Outputs all(p), plain(p);
        gpu_run(all, problem, Pass::forward);
        judge.forward(all.forward, want, p);
        KernelForwardArgs args = plain.forward_args(problem);
        args.max_logit = {};
        gpu_attend(args);
        judge.out_and_lse(plain.forward, want, p);
        if (HasFailure()) return;
      }
    }
  }
}

// Every row's numbers so many times.
std::vector<double> repeated(const std::vector<double>& values, Index row, Index times) {
  std::vector<double> result;
  for (auto at = values.begin(); at != values.end(); at += row)
    for (Index n = 0; n < times; ++n) result.insert(result.end(), at, at + row);
  return result;
}
KernelProblem with_heads_repeated(const KernelProblem& few, Index times) {
  KernelProblem many = few;
  const AttentionProblem& from = few.p;
  AttentionProblem& p = many.p;
  p.hq *= times;
  p.hk *= times;
  p.q = Buffer(p.view, p.dtype, p.tq, p.hq, p.dqk);
  p.k = Buffer(p.view, p.dtype, p.tk, p.hk, p.dqk);
  p.v = Buffer(p.view, p.dtype, p.tk, p.hk, p.dv);
  p.sink_logits = Buffer(DType::f64, 1, p.hq, 1);
  p.q.set_used(repeated(from.q.values(), from.hq * p.dqk, times), p.q_used);
  p.k.set_used(repeated(from.k.values(), from.hk * p.dqk, times), p.k_used);
  p.v.set_used(repeated(from.v.values(), from.hk * p.dv, times), p.k_used);
  p.sink_logits.set(repeated(from.sink_logits.values(), from.hq, times));
  return many;
}
// Parts of many heads are computed one after another.
TEST_P(GpuKeySplits, OneAfterAnotherAreAsAtOnce) {
  constexpr Index kTimes = 200;
  Random random(55);
  for (const Index width : {64, 128, 192, 256}) {
    KernelProblem few = problem_of_parts(dtype(), width, 1, random);
    few.p.sink = Sink::Kind::learnable;
    KernelProblem many = with_heads_repeated(few, kTimes);
    for (const Index keys_per_split : {128, 384}) {
      SCOPED_TRACE("width " + std::to_string(width) + ", parts of " + std::to_string(keys_per_split));
      few.keys_per_split = many.keys_per_split = keys_per_split;
      for (const bool logits : {true, false}) {
        const Outputs want(few.p), got(many.p);
        KernelForwardArgs once = want.forward_args(few), more = got.forward_args(many);
        if (!logits) once.max_logit = more.max_logit = {};
        gpu_attend(once);
        gpu_attend(more);
        const auto expect_repeated = [&](const Buffer& all, const Buffer& one, Index dim) {
          EXPECT_TRUE(bits(all) == bits(repeated(one.values(), few.p.hq * dim, kTimes)));
        };
        expect_repeated(got.forward.out, want.forward.out, few.p.dv);
        expect_repeated(got.forward.lse, want.forward.lse, 1);
        if (logits) expect_repeated(got.forward.max_logit, want.forward.max_logit, 1);
        if (HasFailure()) return;
      }
    }
  }
}

// A row of one part has the bits that it has without parts, whatever other rows of its tile see.
TEST_P(GpuKeySplits, RowsOfOnePartKeepTheirBits) {
  KernelProblem problem = make_problem({.tq = 60, .tk = 700, .hq = 2, .hk = 1, .dqk = 128, .dv = 128, .dtype = dtype()},
                                       {{0, 60, 0, 700, -kUnlimited, 225}}, 52);
  const Outputs whole(problem.p), cut(problem.p);
  gpu_run(whole, problem, Pass::forward);
  problem.keys_per_split = 256;
  gpu_run(cut, problem, Pass::forward);
  const std::vector<double> a = whole.forward.out.values(), b = cut.forward.out.values();
  const std::vector<double> a_lse = whole.forward.lse.values(), b_lse = cut.forward.lse.values();
  const std::size_t in_first = 31 * 2 * 128;  // row 30 sees key 255
  EXPECT_TRUE(std::equal(a_lse.begin(), a_lse.begin() + 31 * 2, b_lse.begin()));
  EXPECT_TRUE(std::equal(a.begin(), a.begin() + in_first, b.begin()));
  EXPECT_FALSE(std::equal(a.begin() + in_first, a.end(), b.begin() + in_first)) << "there were no parts";
}

// Whole Q has more tiles than are computed in parts at once, a rank's fewer: the bits are the same either way.
TEST_P(GpuKeySplits, BitsDoNotDependOnHowQueriesAreCut) {
  QueryCuts cuts{.dtype = dtype(), .heads = 200, .keys_per_split = 128};
  for (const Index dim : {40, 128, 192, 256}) {
    cuts.dqk = dim;
    cuts.dv = dim == 192 ? 128 : dim - 8;
    expect_same_however_cut(gpu_kernel, {.causal = true}, cuts);
  }
}

// Padding of NaN lies beside keys, in all parts.
TEST_P(GpuKeySplits, GrowingLogitsAndNanBesideThem) {
  Judge judge(dtype(), false);
  for (const bool falling : {false, true}) {
    KernelProblem problem =
        make_problem({.tq = 100, .tk = 1300, .hq = 2, .hk = 1, .dqk = 64, .dv = 64, .dtype = dtype(), .scale = 1.0},
                     {{0, 50, 5, 1201, -kUnlimited, 1100}, {55, 100, 1204, 1250}}, 53);
    AttentionProblem& p = problem.p;
    std::vector<double> q = p.q.values(), k = p.k.values();
    for (Index row = 0; row < p.tq; ++row)
      for (Index head = 0; head < p.hq; ++head)
        for (Index i = 0; i < p.dqk; ++i) {
          double& x = q[at((row * p.hq + head) * p.dqk + i)];
          x = i == 0 ? static_cast<double>(row % 5) * 4 : x / 8;
        }
    for (Index key = 0; key < p.tk; ++key) k[at(key * p.dqk)] = static_cast<double>((falling ? p.tk - key : key) / 64);
    p.q.set_used(q, p.q_used);
    p.k.set_used(k, p.k_used);
    problem.keys_per_split = 384;
    const Outputs got(p);
    gpu_run(got, problem, Pass::forward);
    judge.forward(got.forward, expected_of(problem, Pass::forward), p);
  }
}

// Lists of the same slices with and without parts, and counters that are at 0 again.
TEST_P(GpuKeySplits, TheSameSlicesAgain) {
  Random random(54);
  KernelProblem problem = problem_of_parts(dtype(), 128, 1, random);
  std::vector<std::vector<std::uint64_t>> first;
  for (int round = 0; round < 3; ++round)
    for (const Index keys_per_split : {Index{128}, kUnlimited, Index{256}}) {
      problem.keys_per_split = keys_per_split;
      const Outputs got(problem.p);
      gpu_attend(got.forward_args(problem));
      const std::vector<std::uint64_t> out = bits(got.forward.out);
      if (round == 0) first.push_back(out);
      EXPECT_EQ(out, first[keys_per_split == 128 ? 0 : keys_per_split == 256 ? 2 : 1]) << round;
    }
  EXPECT_NE(first[0], first[1]);
  EXPECT_NE(first[1], first[2]);
}

// A plan on the device has other tiles, and parts that the host does not know of: the same bits, in a graph too.
TEST_P(GpuKeySplits, FromAPlanOnTheDevice) {
  const Setting settings[] = {{LayoutKind::dual_chunk, false, {.causal = true}, 2, 1},
                              {LayoutKind::zigzag, true, {.left = 400, .right = 30}, 3, 0},
                              {LayoutKind::contiguous, true, {.causal = true}, 4, 3}};
  for (Setting setting : settings) {
    setting.scale = 7;
    setting.dqk = setting.dv = 128;
    SCOPED_TRACE(setting.name());
    Rank rank(setting, dtype(), false);
    const auto graph = rank.plan_and([&] {
      KernelForwardArgs args = rank.forward();
      args.keys_per_split = 256;
      attend(args, gpu_kernel);
    });
    for (const Lengths& lengths : all_lengths()) {
      SCOPED_TRACE(lengths.name);
      KernelProblem problem = rank.problem(lengths, 3);
      problem.keys_per_split = 256;
      const Outputs got(problem.p), want(problem.p);
      rank.replay(*graph, lengths, problem, got);
      ASSERT_NO_THROW(rank.context().check());
      gpu_run(want, problem, Pass::forward);
      expect_same_bits(got, want, Pass::forward);
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace weft::test
