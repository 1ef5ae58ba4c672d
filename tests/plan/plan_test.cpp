// Plans: count and emit agree with make_plan, work stays linear, strides that do not meet are refused.
#include "weft/plan.h"

#include <variant>

#include <gtest/gtest.h>

#include "check/cases/random_case.h"
#include "index.h"
#include "plan/cut.h"
#include "plan/layout_data.h"
#include "plan/plan_subset.h"
#include "plan/runs.h"
#include "refusal.h"

namespace weft {
namespace {

using Indices = std::vector<Index>;

TEST(Plan, SmallExample) {
  // Two documents, causal, zigzag on two ranks: rank 0 holds tokens 0 1 6 7, rank 1 holds 2 3 4 5.
  const Problem p(Stream::from_lengths(Indices{5, 3}), {.causal = true});
  const Layout l = Layout::zigzag(p.packing().q(), 2);
  constexpr Index kInf = kUnlimited;
  EXPECT_EQ(make_plan(p, l.runs(0), l.sequence_order()).slices,
            (std::vector<Slice>{{0, 2, 0, 2, -kInf, 0}, {2, 4, 5, 8, -kInf, 4}}));
  EXPECT_EQ(make_plan(p, l.runs(1), l.runs(0)).slices, (std::vector<Slice>{{0, 3, 0, 2, -kInf, 2}}));
  EXPECT_EQ(pairs_by_rank(p, l), (Indices{3 + 5, 12 + 1}));
  EXPECT_DOUBLE_EQ(imbalance(pairs_by_rank(p, l)), 13 / 10.5);
  EXPECT_EQ(imbalance(std::vector<Index>(2, (Index{1} << 24) + 1)), 1);  // more pairs than an f32 counts
  EXPECT_EQ(touched_keys(make_plan(p, l.runs(0), l.rank_order())), (std::vector<Range>{{0, 4}, {7, 8}}));
}

TEST(Plan, StripedBandsAreDivided) {
  // Window (3, 0) on two stripes: of the keys 0..3 back, a row sees two of its own stripe and two of the other's.
  const Problem p(Stream::from_lengths(Indices{8}), {.causal = true, .left = 3});
  const Layout l = Layout::striped(p.packing().q(), 2);
  EXPECT_EQ(make_plan(p, l.runs(1), l.runs(1)).slices, (std::vector<Slice>{{0, 4, 0, 4, -1, 0}}));
  EXPECT_EQ(make_plan(p, l.runs(0), l.runs(1)).slices, (std::vector<Slice>{{1, 4, 0, 3, -2, -1}}));
}

TEST(Plan, CountAndEmitMakeThePlan) {
  int compared = 0;
  for (unsigned long long seed = 0; seed < 2000; ++seed) {
    check::RandomChoices choices(seed);
    const check::Case c = random_case(choices);
    if (c.mask.slices) continue;  // planned on the host, not by sequence
    const Problem p = problem_of(c);
    const Layouts l = layouts_of(c, p);
    const RunList q = l.q.runs(c.ranks - 1), k = l.k.rank_order();
    const auto* q_runs = std::get_if<RegularRuns>(&q.source().runs);
    const auto* k_runs = std::get_if<RegularRuns>(&k.source().runs);
    if (!q_runs || !k_runs) continue;
    const SequencePlanner planner{
        view(p.packing().q()), view(p.packing().k()), view(p.mask()), *q_runs, *k_runs, q.stride(),
        k.in_sequence_order()};
    std::vector<Slice> slices;
    for (Index i = p.packing().sequences() - 1; i >= 0; --i) {  // any order of sequences will do
      std::vector<Slice> own(at(planner.count(i)));
      planner.emit(i, own.data());
      slices.insert(slices.begin(), own.begin(), own.end());
    }
    EXPECT_EQ(slices, make_plan(p, q, k).slices) << flags(c);
    ++compared;
  }
  EXPECT_GT(compared, 500);
}

// As threads of a device share a sequence: one query run each, and some of the key runs, in all chunks together.
TEST(Plan, SequencesThatARankHoldsMakeItsPlan) {
  int skipped = 0;
  for (unsigned long long seed = 0; seed < 2000; ++seed) {
    check::RandomChoices choices(seed);
    const check::Case c = random_case(choices);
    const Problem p = problem_of(c);
    const Layouts l = layouts_of(c, p);
    const RunList q = l.q.runs(c.ranks - 1), k = l.k.runs(c.ranks / 2);
    if (q.stride() != k.stride()) continue;
    const std::vector<Index> of_q = sequences_in(p.packing().q(), q), of_k = sequences_in(p.packing().k(), k);
    EXPECT_EQ(make_plan(p, q, l.k.rank_order(), of_q).slices, make_plan(p, q, l.k.rank_order()).slices) << seed;
    EXPECT_EQ(make_plan(p, l.q.rank_order(), k, of_k).slices, make_plan(p, l.q.rank_order(), k).slices) << seed;
    skipped += static_cast<Index>(of_q.size()) < p.packing().sequences();
  }
  EXPECT_GT(skipped, 100);
}

TEST(Plan, PartsOneAfterAnotherMakeThePlan) {
  int cut = 0;
  for (unsigned long long seed = 0; seed < 2000; ++seed) {
    check::RandomChoices choices(seed);
    const check::Case c = random_case(choices);
    if (c.mask.slices) continue;
    const Problem p = problem_of(c);
    const Layouts l = layouts_of(c, p);
    const RunList q = l.q.runs(choices.pick(0, c.ranks - 1)), k = l.k.rank_order();
    const auto* q_runs = std::get_if<RegularRuns>(&q.source().runs);
    const auto* k_runs = std::get_if<RegularRuns>(&k.source().runs);
    if (!q_runs || !k_runs) continue;
    const Index size = choices.pick(1, 4), parts = 3;
    std::vector<Slice> slices;
    for (Index i = 0; i < p.packing().sequences(); ++i) {
      for (Index q_part = 0; q_part < 2; ++q_part) {  // a rank has no more runs of a sequence
        for (Index k_part = 0; k_part < parts; ++k_part) {
          using Part = RunSubset<RegularRuns>;
          const Range mine{k_part * size, k_part == parts - 1 ? kUnlimited : (k_part + 1) * size};
          const SequencePlanner<Part, Part> planner{view(p.packing().q()), view(p.packing().k()),
                                                    view(p.mask()),        {*q_runs, {q_part, q_part + 1}},
                                                    {*k_runs, mine},       q.stride(),
                                                    k.in_sequence_order()};
          planner.for_each(i, [&](const Slice& s) {
            slices.push_back(s);
            if (k_part > 0) ++cut;
          });
        }
      }
    }
    ASSERT_EQ(slices, make_plan(p, q, k).slices) << flags(c);
  }
  EXPECT_GT(cut, 1000);
}

TEST(Plan, NoMoreWorkThanSlices) {
  // One rank of 1,024 against the keys of all: a window touches few of the 2,048 pieces of each document, and only
  // those are looked at. Full work would be 40 million runs.
  const Problem p(Stream::from_batch(10000, 4096), {.causal = true, .left = 4});
  const Layout l = Layout::dual_chunk(p.packing().q(), 1024);
  const Plan plan = make_plan(p, l.runs(5), l.rank_order());
  EXPECT_EQ(plan.slices.size(), 10000u * 6);  // two pieces of two tokens, each sees itself and the two before
  EXPECT_EQ(visible_pairs(plan), 10000 * 4 * 5);
}

TEST(Plan, Refusals) {
  const Problem p(Stream::from_lengths(Indices{9}), {.causal = true});
  const Layout striped = Layout::striped(p.packing().q(), 3), zigzag = Layout::zigzag(p.packing().q(), 3);
  expect_refusal([&] { (void)make_plan(p, striped.runs(0), striped.sequence_order()); },
                 {"stride 3", "stride 1", "rank order"});
  expect_refusal([&] { (void)make_plan(p, zigzag.runs(0), striped.runs(0)); }, {"stride 1", "stride 3"});
  const Layout other = Layout::zigzag(Stream::from_lengths(Indices{4, 5}), 3);
  expect_refusal([&] { (void)make_plan(p, other.runs(0), zigzag.runs(0)); },
                 {"query layout", "2 sequences", "1 sequences"});
  expect_refusal([&] { (void)make_plan(p, zigzag.runs(0), other.runs(0)); }, {"key layout"});
  expect_refusal([] { (void)RunList::sequence_order(-1); }, {"-1 tokens"});
  expect_refusal([] { (void)RunList::from_runs({{0, 0, 2}, {2, 1, 2}}, 4); }, {"token 1 is held twice"});
  expect_refusal([] { (void)RunList::from_runs({{0, 0, 2}}, 1); }, {"1 rows"});
  expect_refusal([] { (void)RunList::from_runs({}, -3); }, {"-3 rows"});
}

}  // namespace
}  // namespace weft
