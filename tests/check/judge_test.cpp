// What is allowed of a result: the dense formula's bounds, of all or of some, for sums of any length; and what is still
// seen to be wrong in a long one.
#include "check/judge.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>

#include <gtest/gtest.h>

#include "check/answer.h"
#include "check/cases/random_case.h"
#include "check/definition.h"
#include "check/oracle.h"
#include "kernel/attention_problem.h"
#include "sanitized.h"

namespace weft::check {
namespace {

DenseProblem random_problem(test::AttentionProblem& p, unsigned seed) {
  test::Random random(seed);
  p.tq = random.index(1, 20);
  p.tk = random.index(1, 30);
  p.hk = random.index(1, 2);
  p.hq = p.hk * random.index(1, 2);
  p.softcap = random.chance(0.3) ? 1.5 : 0;
  p.sink = random.chance(0.5) ? Sink::Kind::learnable : Sink::Kind::none;
  p.slices = test::random_slices(random, p.tq, p.tk);
  p.fill(random);
  return p.dense();
}

std::vector<double> numbers(std::vector<double> values) {
  for (double& x : values) x = std::isnan(x) ? 0 : x;
  return values;
}

// Bounds of the dense formula, taken times order and work.
void expect_same(const Bounded& got, const Bounded& dense, const Arithmetic& by, const char* name) {
  ASSERT_EQ(got.value.size(), dense.value.size()) << name;
  for (std::size_t i = 0; i < got.value.size(); ++i) {
    const double bound = by.order * by.work.relative * dense.bound[i];
    if (dense.value[i] != got.value[i]) {
      EXPECT_NEAR(got.value[i], dense.value[i], 1e-13 * (1 + dense.bound[i])) << name << " " << i;
    }
    EXPECT_NEAR(got.bound[i], bound, 1e-9 * bound) << name << " " << i;
  }
}

TEST(Judge, AllowsWhatTheDenseFormulaSays) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    test::AttentionProblem p;
    const DenseProblem problem = random_problem(p, seed);
    const std::vector<double> dout = numbers(p.dout.values());
    const Arithmetic by{.work = rounding(DType::f64), .order = 256};
    const Expected got = expected(problem, dout, by);
    const DenseForward forward = dense_forward(problem);
    const DenseBackward backward = dense_backward(problem, dout);
    expect_same(got.out, forward.out, by, "out");
    expect_same(got.lse, forward.lse, by, "lse");
    expect_same(got.max_logit, forward.max_logit, by, "max_logit");
    expect_same(got.dq, backward.dq, by, "dq");
    expect_same(got.dk, backward.dk, by, "dk");
    expect_same(got.dv, backward.dv, by, "dv");
    expect_same(got.dsink, backward.dsink, by, "dsink");
  }
}

Bounded part(const Bounded& of, const std::vector<Index>& tokens, Index width) {
  Bounded some;
  for (const Index token : tokens)
    for (Index i = token * width; i < (token + 1) * width; ++i) {
      some.value.push_back(of.value[at(i)]);
      some.bound.push_back(of.bound[at(i)]);
    }
  return some;
}

TEST(Judge, OfSomeRowsAndKeysSaysTheSame) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      test::AttentionProblem p;
      p.dtype = dtype;
      const DenseProblem problem = random_problem(p, seed);
      const std::vector<double> dout = numbers(p.dout.values());
      Arithmetic by = kernel_arithmetic(dtype, DType::f32);
      by.order = 2;  // sums of some terms are long, then
      Chosen chosen{std::vector<Index>{p.tq / 2}, std::vector<Index>{0}};
      if (p.tk > 3) chosen.keys->push_back(p.tk - 2);
      const Expected all = expected(problem, dout, by), some = expected(problem, dout, by, chosen);
      const auto same = [](const Bounded& a, const Bounded& b) {
        EXPECT_EQ(a.value, b.value);
        EXPECT_EQ(a.bound, b.bound);
      };
      same(some.out, part(all.out, *chosen.rows, p.hq * p.dv));
      same(some.dq, part(all.dq, *chosen.rows, p.hq * p.dqk));
      same(some.dk, part(all.dk, *chosen.keys, p.hk * p.dqk));
      same(some.dv, part(all.dv, *chosen.keys, p.hk * p.dv));
      same(some.lse, all.lse);
      same(some.max_logit, all.max_logit);
      same(some.dsink, all.dsink);
    }
  }
}

void expect_runs_are_the_visible_pairs(const Case& c) {
  const Definition definition(c);
  std::vector<Range> runs;
  for (Index q = 0; q < definition.q_tokens(); ++q) {
    runs.clear();
    definition.visible_runs(q, runs);
    std::vector<bool> seen(at(definition.k_tokens()), false);
    Index end = 0;
    for (const Range& r : runs) {
      EXPECT_LE(end, r.begin) << flags(c);
      end = r.end;
      for (Index k = r.begin; k < r.end; ++k) seen[at(k)] = true;
    }
    for (Index k = 0; k < definition.k_tokens(); ++k)
      ASSERT_EQ(seen[at(k)], definition.visible(q, k)) << q << ", " << k << ": " << flags(c);
  }
}

TEST(Judge, VisibleRunsAreTheVisiblePairs) {
  for (unsigned long long seed = 0; seed < 300; ++seed) {
    RandomChoices choices(seed);
    expect_runs_are_the_visible_pairs(seed % 2 == 0 ? random_case(choices)
                                                    : random_large_case(choices, {.least = 30, .most = 120}));
  }
}

TEST(Judge, VisibleRunsOfBoundsOfAnySize) {
  const Index huge = std::numeric_limits<Index>::max();
  for (const Align align : {Align::top_left, Align::bottom_right})
    for (const Index left : {Index{-1}, Index{0}, huge - 3, huge})
      for (const Index right : {Index{-1}, Index{0}, huge})
        expect_runs_are_the_visible_pairs(
            {.q = {{0, 5, 7}}, .k = Side{{0, 3, 7}}, .mask = {.align = align, .left = left, .right = right}});
  for (const Index bound : {-huge, -kUnlimited, Index{0}, kUnlimited, huge})
    expect_runs_are_the_visible_pairs(
        {.q = {{0, 7}}, .mask = {.slices = std::vector<Slice>{{0, 7, 0, 4, -huge, bound}, {0, 7, 4, 7, bound, huge}}}});
}

TEST(Judge, LargeCasesAreOfTheSizeAskedFor) {
  for (unsigned long long seed = 0; seed < 200; ++seed) {
    RandomChoices choices(seed);
    const Case c = random_large_case(choices, {});
    const Index tokens = c.q.cu_seqlens.back() - c.q.cu_seqlens.front();
    EXPECT_GE(tokens, 4000) << flags(c);
    EXPECT_LE(tokens, 20000) << flags(c);
    EXPECT_NO_THROW(layouts_of(c, problem_of(c)));
  }
}

// One after another in f32, as kernels add: what sums of exponentials and of products may be off by. Equal terms round
// the same way each time, and so do those that a softcap has made all but equal.
TEST(Judge, SumsInF32AreInsideHoweverLong) {
  for (const double spread : {1.0, 0.1, 1e-4, 0.0, -1.0}) {  // -1: a softcap holds all logits at its two ends
    for (const Index keys : {100, 1000, 9000, 60000}) {
      SCOPED_TRACE(std::to_string(spread) + ", " + std::to_string(keys) + " keys");
      test::Random random(static_cast<unsigned>(keys));
      DenseProblem p{.tokens_q = 1, .tokens_k = keys};
      p.q = {1};
      p.k = random.values(keys);
      p.v = random.values(keys);
      p.ranges = [&](Index, std::vector<Range>& to) { to.push_back({0, keys}); };
      if (spread < 0) {
        p.softcap = 0.5;
        p.scale = 20;
      }
      for (double& x : p.k) x = static_cast<float>(spread < 0 ? x : 0.3 + spread * x);
      for (double& x : p.v) x = static_cast<float>(spread < 0 ? x : 0.7 + spread * x);
      const Expected want = expected(p, {}, kernel_arithmetic(DType::f32, DType::f32));
      float sum = 0, out = 0;
      for (Index j = 0; j < keys; ++j) {
        const double x = p.softcap > 0 ? p.softcap * std::tanh(p.scale * p.k[at(j)] / p.softcap) : p.k[at(j)];
        const float e = static_cast<float>(std::exp(x - want.max_logit.value[0]));
        sum += e;
        out = std::fma(e, static_cast<float>(p.v[at(j)]), out);
      }
      const double lse = want.max_logit.value[0] + std::log(static_cast<double>(sum));
      EXPECT_LT(std::abs(lse - want.lse.value[0]), want.lse.bound[0]);
      EXPECT_LT(std::abs(static_cast<double>(out / sum) - want.out.value[0]), want.out.bound[0]);
      // And not more than the sums explain: as many roundings as terms at the very most.
      const double n = static_cast<double>(keys), most = 2 * (n + 16 * (4 + std::abs(want.lse.value[0]))) * 0x1p-24;
      EXPECT_LT(want.lse.bound[0], most);
      if (spread == 1.0 && keys == 60000) {
        EXPECT_LT(want.lse.bound[0], 600 * 0x1p-24);  // a walk, no drift
      }
    }
  }
}

// A problem with long sums, answered by the best kernel of this machine, and then by one that does a little wrong.
class LongSums : public testing::Test {
 protected:
  static constexpr Index kTokens = test::kSanitized ? 2500 : 9000;

  explicit LongSums(DType dtype = DType::f32) : case_(case_of(dtype)), oracle_(oracle_of(dtype)) {}

  static Case case_of(DType dtype) {
    return {.q = {.cu_seqlens = {0, kTokens}},
            .mask = {.causal = true},
            .heads_q = 1,
            .dim_qk = 4,
            .dim_v = 4,
            .dtype = dtype,
            .sink = Case::SinkKind::learnable};
  }
  // Made once: they take seconds.
  static Oracle& oracle_of(DType dtype) {
    static std::map<DType, std::unique_ptr<Oracle>> made;
    std::unique_ptr<Oracle>& oracle = made[dtype];
    if (!oracle) oracle = std::make_unique<Oracle>(case_of(dtype), kernel_arithmetic(dtype, DType::f32), 64, 64);
    return *oracle;
  }
  Results answer() {
    static std::map<DType, std::unique_ptr<Results>> made;
    std::unique_ptr<Results>& first = made[case_.dtype];
    const ResultTypes types{.out = case_.dtype, .lse = DType::f32, .gradients = DType::f32};
    if (!first) first = std::make_unique<Results>(answer_of(oracle_, types));
    Results r = oracle_.nothing(types);
    for (Tensor Results::* tensor : {&Results::out, &Results::lse, &Results::dq, &Results::dk, &Results::dv})
      std::copy((*first.*tensor).bytes.begin(), (*first.*tensor).bytes.end(), (r.*tensor).bytes.begin());
    r.max_logit = first->max_logit;
    r.dsink = first->dsink;
    return r;
  }

  // Which tensors are wrong, in one word: "", "lse", "out,lse".
  std::string wrong(const Results& r) const {
    std::string names;
    for (const Measure& m : oracle_.compare(r))
      if (!(m.worst < 1)) names += (names.empty() ? "" : ",") + m.tensor;
    return names;
  }

  // .. after something was done to a right answer.
  std::string wrong_if(const std::function<void(Results&)>& spoil) {
    Results r = answer();
    spoil(r);
    return wrong(r);
  }

  static std::vector<double> row(const Tensor& t, Index token) {
    std::vector<double> values(at(t.view.dim));
    load_row(t.view, token, 0, values.data());
    return values;
  }
  static void set(Tensor& t, Index token, const std::vector<double>& values) {
    store_row(t.view, token, 0, values.data());
  }
  static double dot(const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
  }

  // What a pair adds, in f64, with the results as they are.
  struct Pair {
    double share = 0, ds = 0;
  };
  Pair pair(const Results& r, Index q, Index k) {
    const double logit = dot(row(oracle_.q(), q), row(oracle_.k(), k)) / 2;  // the root of dim 4
    const double share = std::exp(logit - row(r.lse, q)[0]);
    const std::vector<double> g = row(oracle_.dout(), q);
    return {share, share * (dot(g, row(oracle_.v(), k)) - dot(g, row(r.out, q))) / 2};
  }
  static void add(Tensor& to, Index token, double factor, const std::vector<double>& values) {
    std::vector<double> sum = row(to, token);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += factor * values[i];
    set(to, token, sum);
  }
  // A key whose share of the row is about the mean, and which is not the row's own.
  Index usual_key(const Results& r, Index q) {
    for (Index k = q / 3;; ++k)
      if (pair(r, q, k).share * static_cast<double>(q) > 0.8) return k;
  }

  Case case_;
  Oracle& oracle_;
};

TEST_F(LongSums, AreRight) { EXPECT_EQ(wrong(answer()), ""); }

TEST_F(LongSums, AKeyThatIsMissingForOneQueryIsSeen) {
  const Results right = answer();
  // lse is looked at in all rows, out in those that were chosen.
  const Index any = kTokens - 17, chosen = oracle_.rows()[oracle_.rows().size() - 3];
  for (const Index q : {any, chosen}) {
    const Index k = usual_key(right, q);
    const double share = pair(right, q, k).share;
    EXPECT_EQ(wrong_if([&](Results& r) { add(r.lse, q, 1, {std::log1p(-share)}); }), "lse") << q;
    std::vector<double> out = row(right.out, q), v = row(oracle_.v(), k);
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = (out[i] - share * v[i]) / (1 - share);
    EXPECT_EQ(wrong_if([&](Results& r) { set(r.out, q, out); }), q == chosen ? "out" : "") << q;
  }
}

TEST_F(LongSums, APairThatIsMissingInOneGradientIsSeen) {
  const Results right = answer();
  const Index q = oracle_.rows()[oracle_.rows().size() - 3], k = (*oracle_.keys())[oracle_.keys()->size() / 2];
  const Index late = kTokens - 5, early = usual_key(right, q);
  const Pair of_row = pair(right, q, early), of_key = pair(right, late, k);
  EXPECT_EQ(wrong_if([&](Results& r) { add(r.dq, q, -of_row.ds, row(oracle_.k(), early)); }), "dq");
  EXPECT_EQ(wrong_if([&](Results& r) { add(r.dk, k, -of_key.ds, row(oracle_.q(), late)); }), "dk");
  EXPECT_EQ(wrong_if([&](Results& r) { add(r.dv, k, -of_key.share, row(oracle_.dout(), late)); }), "dv");
}

TEST_F(LongSums, ARowThatIsScaledByOnePercentIsSeen) {
  const Index q = oracle_.rows()[20], k = (*oracle_.keys())[20];
  EXPECT_EQ(wrong_if([&](Results& r) { add(r.dv, k, 0.01, row(r.dv, k)); }), "dv");
  EXPECT_EQ(wrong_if([&](Results& r) { add(r.dk, k, 0.01, row(r.dk, k)); }), "dk");
  EXPECT_EQ(wrong_if([&](Results& r) { add(r.dq, q, 0.01, row(r.dq, q)); }), "dq");
  EXPECT_EQ(wrong_if([&](Results& r) { add(r.out, q, 0.01, row(r.out, q)); }), "out");
  EXPECT_EQ(wrong_if([&](Results& r) { r.dsink[0] *= 1.001; }), "dsink");
}

TEST_F(LongSums, NaNIsSeenInRowsThatNobodyLooksAt) {
  Index other = 0;
  while (std::find(oracle_.keys()->begin(), oracle_.keys()->end(), other) != oracle_.keys()->end()) ++other;
  EXPECT_EQ(wrong_if([&](Results& r) { add(r.dv, other, std::nan(""), {1, 1, 1, 1}); }), "dv");
}

class LongSumsBf16 : public LongSums {
 protected:
  LongSumsBf16() : LongSums(DType::bf16) {}
};

// Roundings of P, dS and out to bf16 allow about a tenth of a small row of dq.
TEST_F(LongSumsBf16, AreRightAndAThirdIsSeen) {
  EXPECT_EQ(wrong(answer()), "");
  const Index q = oracle_.rows()[20], k = (*oracle_.keys())[20];
  EXPECT_EQ(wrong_if([&](Results& r) { add(r.dv, k, 1.0 / 3, row(r.dv, k)); }), "dv");
  EXPECT_EQ(wrong_if([&](Results& r) { add(r.dq, q, 1.0 / 3, row(r.dq, q)); }), "dq");
  EXPECT_EQ(wrong_if([&](Results& r) { add(r.lse, q, 1, {1e-4}); }), "lse");
}

}  // namespace
}  // namespace weft::check
