// Layouts: who holds what, rows out and back, how even the balanced one is, and what is refused.
#include "weft/layout.h"

#include <cmath>
#include <random>

#include <gtest/gtest.h>

#include "check/cases/random_case.h"
#include "check/definition.h"
#include "index.h"
#include "refusal.h"
#include "weft/cost.h"
#include "weft/plan.h"

namespace weft {
namespace {

using Indices = std::vector<Index>;

TEST(Layout, Examples) {
  const Stream eight = Stream::from_lengths(Indices{8});
  EXPECT_EQ(Layout::contiguous(eight, 2).tokens(1), (Indices{4, 5, 6, 7}));
  EXPECT_EQ(Layout::dual_chunk(eight, 2).tokens(0), (Indices{0, 1, 6, 7}));
  EXPECT_EQ(Layout::zigzag(eight, 2).tokens(1), (Indices{2, 3, 4, 5}));
  EXPECT_EQ(Layout::striped(eight, 2).tokens(1), (Indices{1, 3, 5, 7}));
  // The last rank's two pieces are neighbours: one run.
  EXPECT_EQ(Layout::zigzag(eight, 2).runs(1).runs(), (std::vector<weft::Run>{{0, 2, 4, 1}}));
  // Only the end of the pack is padded, whatever the documents' lengths.
  const Stream odd = Stream::from_lengths(Indices{3, 2});
  EXPECT_EQ(Layout::zigzag(odd, 2).rows(), 4);
  EXPECT_EQ(Layout::zigzag(odd, 2).tokens(0), (Indices{0, 1, kNoToken, kNoToken}));
  EXPECT_EQ(Layout::zigzag(odd, 2).tokens(1), (Indices{2, 3, 4, kNoToken}));
}

TEST(Layout, Names) {
  for (const char* n : {"contiguous", "dual_chunk", "zigzag", "striped", "balanced", "placed", "explicit"})
    EXPECT_EQ(name(layout_kind(n)), n);
  expect_refusal([] { (void)layout_kind("spiral"); }, {"'spiral'", "zigzag"});
}

TEST(Layout, PositionsFollowTheSequence) {
  const Indices padded{1, 5, 5, 9}, used{3, 0, 4};
  const Layout l = Layout::contiguous(Stream::from_used(padded, used, 11), 1);
  EXPECT_EQ(l.tokens(0), (Indices{1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(l.positions(0), (Indices{0, 1, 2, 0, 0, 1, 2, 3}));  // token 4 is padding
}

TEST(Layout, PositionsAgreeWithTheDefinition) {
  for (unsigned long long seed = 0; seed < 500; ++seed) {
    check::RandomChoices choices(seed);
    const check::Case c = random_case(choices);
    if (c.tree) continue;  // a layout knows rows of the stream; Tree::positions has those of its sequences
    const check::Definition definition(c);
    const Layouts l = layouts_of(c, problem_of(c));
    for (Index r = 0; r < c.ranks; ++r) {
      const Indices tokens = l.k.tokens(r), positions = l.k.positions(r);
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        const bool real = tokens[i] != kNoToken && definition.k(tokens[i]).real();
        EXPECT_EQ(positions[i], real ? definition.k(tokens[i]).position : 0) << flags(c);
      }
    }
  }
}

// Views of the same numbers: rows apart, and [length, batch] order.
struct Rows {
  std::vector<int> data;
  RowTensor tensor;
};
Rows dense_rows(Index rows) {
  Rows r{std::vector<int>(at(2 * rows), -7), {}};
  r.tensor = {.data = r.data.data(), .rows = rows, .row_bytes = 8};
  return r;
}
Rows spread_rows(Index rows) {
  Rows r{std::vector<int>(at(5 * rows), -7), {}};
  r.tensor = {.data = r.data.data(), .rows = rows, .row_bytes = 8, .row_stride = 20};
  return r;
}
Rows nested_rows(Index rows) {
  const Index inner = 3, outer = (rows + 2) / 3;
  Rows r{std::vector<int>(at(2 * inner * outer), -7), {}};
  r.tensor = {
      .data = r.data.data(), .rows = rows, .row_bytes = 8, .row_stride = outer * 8, .inner = inner, .outer_stride = 8};
  return r;
}
int* row_at(const Rows& r, Index row) {
  const RowTensor& t = r.tensor;
  const Index stride = t.row_stride ? t.row_stride : t.row_bytes;
  const Index bytes = t.inner ? row / t.inner * t.outer_stride + row % t.inner * stride : row * stride;
  return static_cast<int*>(t.data) + bytes / 4;
}

TEST(Layout, ShardAndBack) {
  for (unsigned long long seed = 0; seed < 600; ++seed) {
    check::RandomChoices choices(seed);
    const check::Case c = random_case(choices);
    const Layout l = layouts_of(c, problem_of(c)).q;
    const Index tokens = l.stream().tokens();
    const auto make = seed % 3 == 0 ? dense_rows : seed % 3 == 1 ? spread_rows : nested_rows;
    Rows whole = make(tokens), back = make(tokens);
    for (Index t = 0; t < tokens; ++t) {
      row_at(whole, t)[0] = static_cast<int>(t);
      row_at(whole, t)[1] = static_cast<int>(-t);
    }
    std::vector<bool> held(at(tokens), false);
    for (Index r = 0; r < c.ranks; ++r) {
      Rows local = make(l.rows());
      l.shard(r, whole.tensor, local.tensor);
      const Indices own = l.tokens(r);
      for (Index row = 0; row < l.rows(); ++row) {
        const Index t = own[at(row)];
        EXPECT_EQ(row_at(local, row)[0], t == kNoToken ? 0 : t) << flags(c);
        EXPECT_EQ(row_at(local, row)[1], t == kNoToken ? 0 : -t);
        if (t != kNoToken) held[at(t)] = true;
      }
      l.unshard(r, local.tensor, back.tensor);
    }
    for (Index t = 0; t < tokens; ++t)  // what no rank holds stays untouched
      EXPECT_EQ(row_at(back, t)[0], held[at(t)] ? t : -7) << flags(c);
  }
}

Indices lognormal(unsigned seed, Index count, double median, double sigma, Index longest) {
  std::mt19937 engine(seed);
  std::lognormal_distribution<double> draw(std::log(median), sigma);
  Indices out;
  for (Index i = 0; i < count; ++i) out.push_back(std::clamp<Index>(std::llround(draw(engine)), 16, longest));
  return out;
}

// The fewer rows a rank has, the more an even share costs in tiles: 14,000 rows a rank or more here, 3,500 and 860.
TEST(Layout, BalancedIsEvenOnOrdinaryPacks) {
  const std::vector<Mask> masks{{.causal = true},
                                {},
                                {.causal = true, .left = 1024},
                                {.left = 256, .right = 256},
                                {.causal = true, .chunk = 2048}};
  double worst = 1;
  for (const Index ranks : {2, 3, 8, 16, 64, 256}) {
    for (unsigned seed = 0; seed < 4; ++seed) {
      const Stream stream = Stream::from_lengths(lognormal(seed, 64, 2400, 1, 16384));
      for (const Mask& mask : masks) {
        const Problem problem(stream, mask);
        const Layout l = Layout::balanced(problem, ranks);
        const double b = imbalance(pairs_by_rank(problem, l));
        worst = std::max(worst, b);
        EXPECT_LE(b, ranks <= 16   ? 1.02
                     : ranks <= 64 ? 1.05
                                   : 1.2)
            << ranks << " ranks, pack " << seed << ", mask " << (&mask - masks.data());
        EXPECT_EQ(l.rows(), (stream.tokens() + ranks - 1) / ranks);
      }
    }
  }
  std::cout << "largest share over mean: " << worst << std::endl;
}

// Runs are few: each costs a message and a slice. What it took when this was written, on packs that are hard to even
// out.
TEST(Layout, BalancedTakesFewRuns) {
  struct Pack {
    unsigned seed;
    Index documents, ranks, runs;
  };
  for (const Pack& p :
       {Pack{1, 5, 3, 19}, {2, 7, 4, 28}, {3, 11, 5, 33}, {4, 6, 8, 60}, {5, 20, 7, 51}, {6, 40, 16, 125}}) {
    std::mt19937 engine(p.seed);
    Indices lengths;
    for (Index i = 0; i < p.documents; ++i) lengths.push_back(static_cast<Index>(16 + engine() % 50 * (engine() % 50)));
    const Problem problem(Stream::from_lengths(lengths), {.causal = true});
    const Layout l = Layout::balanced(problem, p.ranks);
    std::size_t runs = 0;
    for (Index r = 0; r < p.ranks; ++r) runs += l.runs(r).runs().size();
    EXPECT_LE(runs, at(p.runs)) << p.seed;
    EXPECT_LE(imbalance(pairs_by_rank(problem, l)), 1.07) << p.seed;
  }
}

// Blocks so small that all ranks have the same pairs fill fewer of their tiles: the busiest rank's covered pairs count.
TEST(Layout, BalancedWeighsTiles) {
  const KernelRate rate{.tile_q = 128, .tile_k = 128};
  for (const Index window : {-1, 1024}) {
    double ratio = 0;
    constexpr unsigned kPacks = 4;
    constexpr Index kRanks = 64;
    for (unsigned seed = 0; seed < kPacks; ++seed) {
      const Problem problem(Stream::from_lengths(lognormal(seed, 64, 2400, 1, 16384)),
                            {.causal = true, .left = window});
      const Layout l = Layout::balanced(problem, kRanks);
      double busiest = 0;
      for (Index r = 0; r < kRanks; ++r)
        busiest =
            std::max(busiest, tile_work(make_plan(problem, l.runs(r), l.rank_order()).slices, 8, 1, rate).covered);
      ratio += busiest * kRanks / static_cast<double>(8 * problem.visible_pairs()) / kPacks;
    }
    std::cout << "window " << window << ": covered pairs of the busiest rank over mean pairs " << ratio << std::endl;
    EXPECT_LE(ratio, window < 0 ? 1.22 : 1.3);
  }
}

TEST(Layout, BalancedBeatsTheOthersOnAHardPack) {
  Indices docs(40, 64);
  docs.push_back(30000);  // one long document at the end of many short ones
  const Problem problem(Stream::from_lengths(docs), {.causal = true});
  const auto share = [&](LayoutKind kind) {
    return imbalance(pairs_by_rank(problem, make_layouts(kind, problem, 8).q));
  };
  EXPECT_LE(share(LayoutKind::balanced), 1.05);
  EXPECT_GT(share(LayoutKind::contiguous), 1.5);
}

TEST(Layout, MoreRanksThanTokens) {
  const Problem problem(Stream::from_lengths(Indices{2, 1}), {.causal = true});
  for (const LayoutKind kind :
       {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped, LayoutKind::balanced, LayoutKind::placed}) {
    const Layouts l = make_layouts(kind, problem, 16);
    Index pairs = 0;
    for (Index r = 0; r < 16; ++r) pairs += visible_pairs(make_plan(problem, l.q.runs(r), l.k.rank_order()));
    EXPECT_EQ(pairs, 4) << name(kind);
  }
}

TEST(Layout, Refusals) {
  const Stream s = Stream::from_lengths(Indices{8, 1030});
  expect_refusal([&] { (void)Layout::dual_chunk(s, 8); },
                 {"sequence 0: padded length 8 is not a multiple of 2*ranks = 16", "pad to 16", "zigzag"});
  expect_refusal([&] { (void)Layout::dual_chunk(s, 4); }, {"sequence 1: padded length 1030", "1032"});
  expect_refusal([&] { (void)Layout::contiguous(s, 0); }, {"0 ranks", "1 to"});
  expect_refusal([&] { (void)Layout::striped(s, -4); }, {"-4 ranks"});
  expect_refusal([&] { (void)Layout::zigzag(s, Index{1} << 40); }, {"1099511627776 ranks"});
  expect_refusal([&] { (void)Layout::zigzag(s, 2).runs(2); }, {"rank 2 of 2", "0 to 1"});
  expect_refusal([&] { (void)Layout::zigzag(s, 2).runs(-1); }, {"rank -1 of 2"});
  expect_refusal([&] { (void)Layout::zigzag(s, 4).rank_order({1, 4, 1}); }, {"rank 4 of 4"});
  expect_refusal([&] { (void)Layout::zigzag(s, 4).rank_order({0, 0, 1}); }, {"0 of 4 ranks"});
  expect_refusal([&] { (void)make_layouts(LayoutKind::explicit_runs, Problem(s, {}), 2); }, {"by its runs"});
}

TEST(Layout, ExplicitRefusals) {
  const Indices padded{0, 4, 8}, used{4, 2};
  const Stream s = Stream::from_used(padded, used);
  const auto runs = [&](const std::vector<std::vector<weft::Run>>& r) {
    return [=] { (void)Layout::explicit_runs(s, r); };
  };
  EXPECT_NO_THROW(runs({{{0, 0, 4}}, {{0, 4, 2}}})());  // padding may be held by nobody
  expect_refusal(runs({}), {"0 ranks"});
  expect_refusal(runs({{{0, 0, 5}}, {{0, 4, 2}}}), {"rank 1: token 4 is held twice"});
  expect_refusal(runs({{{0, 0, 4}}, {{0, 5, 1}}}), {"token 4 (sequence 1) is held by no rank"});
  expect_refusal(runs({{{0, 0, 4}, {3, 4, 2}}}), {"rank 0: row 3 is held by two runs"});
  expect_refusal(runs({{{0, 0, 9}}}), {"token 8 of a stream of 8"});
  expect_refusal(runs({{{-1, 0, 6}}}), {"rank 0: run {row -1"});
  expect_refusal(runs({{{0, 0, 6, 0}}}), {"stride 0"});
  expect_refusal(runs({{{0, 0, 2, 2}, {2, 1, 2, 4}, {4, 3, 1, 1}, {5, 4, 1, 1}}}), {"different strides", "stride 4"});
  expect_refusal(runs({{{0, 0, 3, INT64_MAX}}}), {"reaches past token"});
  expect_refusal(runs({{{0, INT64_MAX, 1}}}), {"reaches past token"});
  expect_refusal(runs({{{INT64_MAX, 0, INT64_MAX}}}), {"does not lie inside"});
}

TEST(Layout, ShardRefusals) {
  const Layout l = Layout::zigzag(Stream::from_lengths(Indices{8}), 2);
  Rows whole = dense_rows(8), local = dense_rows(4);
  const auto shard = [&](auto change) {
    return [&, change] {
      RowTensor a = whole.tensor, b = local.tensor;
      change(a, b);
      l.shard(0, a, b);
    };
  };
  EXPECT_NO_THROW(shard([](RowTensor&, RowTensor&) {})());
  expect_refusal(shard([](RowTensor& a, RowTensor&) { a.rows = 7; }), {"whole has 7 rows", "8"});
  expect_refusal(shard([](RowTensor&, RowTensor& b) { b.rows = 5; }), {"local has 5 rows", "4"});
  expect_refusal(shard([](RowTensor&, RowTensor& b) { b.row_bytes = 4; }), {"local has rows of 4 bytes", "8"});
  expect_refusal(shard([](RowTensor& a, RowTensor& b) { a.row_bytes = b.row_bytes = 0; }), {"0 bytes"});
  expect_refusal(shard([](RowTensor& a, RowTensor&) { a.data = nullptr; }), {"whole has no data"});
  expect_refusal(shard([](RowTensor& a, RowTensor&) { a.inner = -1; }), {"inner = -1"});
}

}  // namespace
}  // namespace weft
