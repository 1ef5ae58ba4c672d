// Placements: who holds what, how few ranks, how near, how even, and what is refused.
#include "weft/placed.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "index.h"
#include "refusal.h"
#include "weft/choose.h"
#include "weft/cost.h"
#include "weft/plan.h"
#include "weft/simulate.h"

namespace weft {
namespace {

using Indices = std::vector<Index>;
using Why = PlacedSequence::Why;

Indices lognormal_lengths(unsigned seed, Index tokens, double median, double sigma) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal(std::log(median), sigma);
  Indices lengths;
  for (Index left = tokens; left > 0; left -= lengths.back())
    lengths.push_back(min_of(left, max_of(16, min_of(tokens / 4, static_cast<Index>(std::exp(normal(engine)))))));
  return lengths;
}

Problem causal(const Indices& lengths) { return Problem(Stream::from_lengths(lengths), {.causal = true}); }

// Ranks that hold tokens of a sequence, and the rows of each rank that hold any.
struct Held {
  std::vector<std::set<Index>> ranks;  // by sequence
  Indices rows;                        // by rank

  explicit Held(const Layout& l) : ranks(at(l.stream().sequences())), rows(at(l.ranks()), 0) {
    std::vector<bool> held(at(l.stream().tokens()), false);
    for (Index r = 0; r < l.ranks(); ++r) {
      Index last = -1;
      for (const Index t : l.tokens(r)) {
        if (t == kNoToken) continue;
        EXPECT_GT(t, last) << "rank " << r << " is not in the order of tokens";
        last = t;
        EXPECT_FALSE(held[at(t)]) << "token " << t << " is held twice";
        held[at(t)] = true;
        ++rows[at(r)];
        Index i = 0;
        while (l.stream().offset(i + 1) <= t) ++i;
        ranks[at(i)].insert(r);
      }
    }
    for (Index i = 0; i < l.stream().sequences(); ++i)
      for (Index n = 0; n < l.stream().padded(i); ++n)
        EXPECT_TRUE(held[at(l.stream().offset(i) + n)]) << "sequence " << i << ", token " << n;
  }
};

TEST(Placed, EveryTokenOnceAndTheReportSaysWhere) {
  std::mt19937 engine(1);
  const auto pick = [&](Index low, Index high) { return low + static_cast<Index>(engine()) % (high - low + 1); };
  for (int round = 0; round < 150; ++round) {
    const Index ranks = pick(1, 40), node = pick(1, 9);
    Indices offsets{pick(0, 3)}, used;
    for (Index n = pick(0, 60); n > 0; --n) {
      used.push_back(pick(0, 9) == 0 ? pick(0, 5000) : pick(0, 300));
      offsets.push_back(offsets.back() + used.back() + (pick(0, 3) == 0 ? pick(0, 20) : 0));
    }
    const Problem problem(Stream::from_used(offsets, used), {.causal = pick(0, 2) > 0, .left = pick(0, 2) ? -1 : 64});
    const Index tokens = problem.packing().q().extent().size(), even = (tokens + ranks - 1) / ranks;
    const Index capacity = pick(0, 2) == 0 ? 0 : even + pick(0, even);
    SCOPED_TRACE(testing::Message() << "round " << round << ", " << ranks << " ranks, nodes of " << node);
    const Placement p = place(problem, ranks, {.capacity = capacity, .node = node});
    const Held held(p.layouts.q);
    EXPECT_EQ(p.capacity, capacity > 0 ? capacity : even + even / 16);
    EXPECT_LE(p.layouts.q.rows(), p.capacity);
    EXPECT_EQ(p.layouts.q.rows(), tokens == 0 ? 0 : *std::max_element(held.rows.begin(), held.rows.end()));
    ASSERT_EQ(p.sequences.size(), used.size());
    for (std::size_t i = 0; i < used.size(); ++i) {
      std::set<Index> nodes;
      for (const Index r : held.ranks[i]) nodes.insert(r / node);
      EXPECT_EQ(p.sequences[i].ranks, static_cast<Index>(held.ranks[i].size())) << i;
      EXPECT_EQ(p.sequences[i].nodes, static_cast<Index>(nodes.size())) << i;
      EXPECT_EQ(p.sequences[i].why == Why::whole, p.sequences[i].ranks <= 1) << i;
    }
    EXPECT_EQ(place(problem, ranks, {.capacity = capacity, .node = node}).layouts.q.fingerprint(),
              p.layouts.q.fingerprint());
    if (HasFailure()) return;
  }
}

TEST(Placed, ShortOnesAreWholeAndALongOneIsShared) {
  Indices lengths(40, 500);
  lengths[17] = 20000;
  const Placement p = place(causal(lengths), 16, {.capacity = 20000});
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    EXPECT_EQ(p.sequences[i].why, i == 17 ? Why::work : Why::whole) << i;
    EXPECT_EQ(p.sequences[i].ranks == 1, i != 17) << i;
  }
  EXPECT_GE(p.sequences[17].ranks, 6);  // ten times the work of all others together
  EXPECT_NEAR(p.sequences[17].work, 15.4, 0.1);
  EXPECT_NE(p.why().find("39 of 40 sequences whole on one rank"), std::string::npos) << p.why();
  EXPECT_NE(p.why().find("to share their work"), std::string::npos) << p.why();
}

TEST(Placed, WhatFitsANodeStaysInIt) {
  Indices lengths(300, 1000);
  for (const std::size_t i : {5u, 60u, 200u}) lengths[i] = 5000;
  const Placement p = place(causal(lengths), 64, {.capacity = 7000});
  for (std::size_t i = 0; i < lengths.size(); ++i) EXPECT_EQ(p.sequences[i].nodes, 1) << i;
  EXPECT_GT(p.sequences[5].ranks, 1);
  // A sequence that no node can hold lies on several.
  lengths[5] = 200000;
  const Placement far = place(causal(lengths), 64, {.capacity = 9000});
  EXPECT_GT(far.sequences[5].nodes, 1);
  EXPECT_EQ(far.sequences[5].why, Why::rows);
}

double imbalance_of(const Problem& problem, const Layout& layout) {
  const Indices pairs = pairs_by_rank(problem, layout);
  double sum = 0;
  for (const Index n : pairs) sum += static_cast<double>(n);
  return static_cast<double>(*std::max_element(pairs.begin(), pairs.end())) / (sum / static_cast<double>(pairs.size()));
}

// Where moving is free, work is as even as a capacity of a sixteenth more rows than the mean allows.
TEST(Placed, WorkIsEvenWhereMovingIsFree) {
  for (const Mask& mask : {Mask{.causal = true}, Mask{}, Mask{.causal = true, .left = 1024}}) {
    for (const Index ranks : {3, 8, 32}) {
      for (unsigned seed = 0; seed < 3; ++seed) {
        const Problem problem(Stream::from_lengths(lognormal_lengths(seed, 8192 * ranks, 800, 1.2)), mask);
        const Placement p =
            place(problem, ranks, {.row_seconds = 0, .merge_seconds = 0, .near_seconds = 0, .far_seconds = 0});
        EXPECT_LE(imbalance_of(problem, p.layouts.q), 1.12)
            << ranks << " ranks, seed " << seed << ", window " << mask.left << (mask.causal ? ", causal" : "") << "; "
            << p.why();
      }
    }
  }
}

// Dearer links between nodes: fewer sequences cross.
TEST(Placed, LinksAreWeighed) {
  Index cheap = 0, dear = 0;
  for (unsigned seed = 0; seed < 5; ++seed) {
    const Problem problem = causal(lognormal_lengths(seed, 8192 * 32, 800, 1.2));
    for (const PlacedSequence& s : place(problem, 32, {.far_seconds = 0}).sequences) cheap += s.nodes > 1;
    for (const PlacedSequence& s : place(problem, 32, {.far_seconds = 1e-5}).sequences) dear += s.nodes > 1;
  }
  EXPECT_LE(dear, cheap);
  EXPECT_LE(dear, 2);
}

double simulated_exact(const Problem& problem, const Layouts& layouts, Index node) {
  double best = 1e9;
  for (const Index stages : {1, 4}) {
    for (const Index each : {Index{1}, node}) {
      double sum = 0;
      for (const Pass pass : {Pass::forward, Pass::backward})
        sum += simulate({problem,
                         layouts,
                         64,
                         8,
                         {.kind = ScheduleKind::exact, .stages = stages, .node = each},
                         {.dtype = DType::bf16, .dim_qk = 128, .dim_v = 128}},
                        machine_preset("h100-400g"), pass)
                   .seconds;
      best = std::min(best, sum);
    }
  }
  return best;
}

// What it is for: documents of usual lengths on several nodes take less time than dealt out by pairs alone.
TEST(Placed, TakesLessTimeThanTheOthers) {
  constexpr Index kRanks = 32;
  double placed = 0, balanced = 0;
  for (unsigned seed = 0; seed < 3; ++seed) {
    const Problem problem = causal(lognormal_lengths(seed, 8192 * kRanks, 800, 1.2));
    placed += std::log(simulated_exact(problem, place(problem, kRanks).layouts, 8));
    balanced += std::log(simulated_exact(problem, make_layouts(LayoutKind::balanced, problem, kRanks), 8));
  }
  EXPECT_GT(std::exp((balanced - placed) / 3), 1.3);
}

double best_of(const Problem& problem, const Layouts& layouts) {
  const Layer layer{
      .problem = problem, .heads_q = 64, .heads_k = 8, .shape = {.dtype = DType::bf16, .dim_qk = 128, .dim_v = 128}};
  return choose_schedule(layer, layouts, machine_preset("h100-400g"), {.simulated_slices = 5'000'000}).best().seconds();
}

// Where it cannot win much: one document with nearly all work, and one node.
TEST(Placed, IsNotBehindBalanced) {
  for (const Index ranks : {8, 16, 32}) {
    for (const Index share : {4, 8}) {
      Indices lengths = lognormal_lengths(static_cast<unsigned>(share), 8192 * ranks * (share - 1) / share, 500, 1);
      lengths.insert(lengths.begin() + static_cast<std::ptrdiff_t>(lengths.size() / 3), 8192 * ranks / share);
      const Problem problem = causal(lengths);
      EXPECT_LT(best_of(problem, place(problem, ranks).layouts),
                1.03 * best_of(problem, make_layouts(LayoutKind::balanced, problem, ranks)))
          << ranks << " ranks, a document of 1/" << share;
    }
  }
}

// Rows of a rank that no group of heads can hide are what a placement for one group weighs more.
TEST(Placed, HeadGroupsHideExchanges) {
  const Problem problem = causal(lognormal_lengths(3, 8192 * 32, 800, 1.2));
  const double one = place(problem, 32, {.head_groups = 1}).seconds, four = place(problem, 32).seconds;
  EXPECT_LT(four, one);
  EXPECT_LE(place(problem, 32, {.head_groups = 8}).seconds, four);
}

TEST(Placed, KeysOfAnotherStreamLieWhereTheirQueriesAre) {
  const Indices q{700, 30, 0, 4000, 30}, k{50, 4000, 9, 600, 0};
  const Problem problem(Packing(Stream::from_lengths(q), Stream::from_lengths(k)), {});
  const Placement p = place(problem, 4);
  const Held queries(p.layouts.q), keys(p.layouts.k);
  for (std::size_t i = 0; i < q.size(); ++i) {
    if (q[i] > 0 && k[i] > 0) {
      EXPECT_EQ(queries.ranks[i], keys.ranks[i]) << i;
    }
    if (q[i] == 0) {
      EXPECT_EQ(p.sequences[i].ranks, 0);
    }
  }
}

// Work of the caller's own slices counts where their queries are.
TEST(Placed, OwnSlices) {
  const Indices lengths(16, 1000);
  Mask mask;
  mask.slices = std::vector<Slice>{{3000, 4000, 0, 16000}};  // sequence 3 sees everything, the others nothing
  const Problem problem(Stream::from_lengths(lengths), mask);
  const Placement p = place(problem, 4, {.capacity = 8000});
  EXPECT_EQ(p.sequences[3].ranks, 4);
  for (std::size_t i = 0; i < lengths.size(); ++i) EXPECT_EQ(p.sequences[i].ranks == 1, i != 3) << i;
  mask.slices->front() = {15500, 16500, 0, 100};
  const Stream late = Stream::from_used(Indices{0, 16000}, Indices{16000}, 17000);
  expect_refusal([&] { (void)place(Problem(late, mask), 4); }, {"16500", "query token 16000 is padding"});
}

TEST(Placed, OptionsOfAMachine) {
  const TensorShape shape{.dtype = DType::bf16, .dim_qk = 128, .dim_v = 128};
  const PlacedOptions o = placed_options(machine_preset("h100-400g"), 64, 8, shape), usual;
  EXPECT_NEAR(o.pair_seconds / usual.pair_seconds, 1, 0.02);
  EXPECT_NEAR(o.row_seconds / usual.row_seconds, 1, 0.02);
  EXPECT_NEAR(o.merge_seconds / usual.merge_seconds, 1, 0.02);
  EXPECT_NEAR(o.near_seconds / usual.near_seconds, 1, 0.02);
  EXPECT_NEAR(o.far_seconds / usual.far_seconds, 1, 0.02);
  EXPECT_EQ(o.node, usual.node);
  EXPECT_EQ(o.head_groups, usual.head_groups);
  EXPECT_EQ(placed_options(machine_preset("h100-400g"), 64, 1, shape).head_groups, 1);
  EXPECT_LT(placed_options(machine_preset("h100-400g"), 64, 8, shape, false).far_seconds, o.far_seconds / 3);
  const PlacedOptions one =
      placed_options(machine_preset("cpu"), 8, 2, {.dtype = DType::f32, .dim_qk = 64, .dim_v = 64});
  EXPECT_EQ(one.near_seconds, one.far_seconds);
  EXPECT_GT(one.near_seconds, 0);  // ranks copy what they receive
  EXPECT_NO_THROW((void)place(causal({100, 2000, 300}), 4, one));
}

TEST(Placed, Refusals) {
  const Problem problem = causal({100, 50});
  expect_refusal([&] { (void)place(problem, 4, {.capacity = 37}); },
                 {"37 rows on 4 ranks", "150 tokens", "at least 38"});
  EXPECT_LE(place(problem, 4, {.capacity = 38}).layouts.q.rows(), 38);
  expect_refusal([&] { (void)place(problem, 4, {.capacity = -1}); }, {"-1 rows"});
  expect_refusal([&] { (void)place(problem, 4, {.node = 0}); }, {"nodes of 0"});
  expect_refusal([&] { (void)place(problem, 4, {.head_groups = 0}); }, {"0 head groups"});
  expect_refusal([&] { (void)place(problem, 4, {.far_seconds = -1}); }, {"-1 seconds", "from 0"});
  expect_refusal([&] { (void)place(problem, 4, {.pair_seconds = std::nan("")}); }, {"nan"});
  expect_refusal([&] { (void)place(problem, 0); }, {"0 ranks"});
  EXPECT_EQ(name(layout_kind("placed")), "placed");
  EXPECT_EQ(Layout::placed(problem, 2).kind(), LayoutKind::placed);
  EXPECT_EQ(Layout::placed(problem, 2, {.capacity = 75}).rows(), 75);
}

TEST(Placed, NothingToPlace) {
  for (const Indices& lengths : {Indices{}, Indices{0, 0}}) {
    const Placement p = place(causal(lengths), 3);
    EXPECT_EQ(p.layouts.q.rows(), 0);
    EXPECT_EQ(p.sequences.size(), lengths.size());
  }
  const Placement free = place(causal({10, 20}), 2, {.pair_seconds = 0, .row_seconds = 0});
  EXPECT_EQ(Held(free.layouts.q).rows.size(), 2u);
}

}  // namespace
}  // namespace weft
