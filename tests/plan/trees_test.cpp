// A caller's own slices, trees above all: joined into fewer that show the same pairs, checked, planned and dealt out in
// time that does not grow with the square of the nodes.
#include "check/cases/trees.h"

#include <gtest/gtest.h>

#include "check/cases/random_case.h"
#include "index.h"
#include "plan/join_slices.h"
#include "plan/row_pairs.h"
#include "refusal.h"
#include "weft/cost.h"
#include "weft/plan.h"

namespace weft {
namespace {

using check::TreeShape;
using Slices = std::vector<Slice>;
constexpr Index kOpen = kUnlimited;

Problem problem_of(const TreeShape& tree) {
  return Problem(Stream::from_lengths(std::vector<Index>{tree.rows()}), {.slices = check::tree_slices(tree)});
}

std::vector<int> pairs_of(const Slices& slices, Index rows, Index keys) {
  std::vector<int> count(at(rows * keys), 0);
  for (const Slice& s : slices)
    for (Index q = s.q_begin; q < s.q_end; ++q)
      for (Index k = s.k_begin; k < s.k_end; ++k) count[at(q * keys + k)] += sees(s, q, k);
  return count;
}

// A prefix 0:4 and two branches 4:7 and 7:9, written branch by branch: one slice of the prefix for all that see it.
TEST(JoinedSlices, BranchesOfAPrefix) {
  EXPECT_EQ(
      joined_slices(
          {{0, 4, 0, 4, -kOpen, 0}, {4, 7, 0, 4}, {4, 7, 4, 7, -kOpen, 0}, {7, 9, 0, 4}, {7, 9, 7, 9, -kOpen, 0}}),
      (Slices{{0, 9, 0, 4, -kOpen, 0}, {4, 7, 4, 7, -kOpen, 0}, {7, 9, 7, 9, -kOpen, 0}}));
  // The first branch has as many rows as the prefix has keys: both become one range of keys for it.
  EXPECT_EQ(joined_slices({{0, 9, 0, 3, -kOpen, 0}, {3, 7, 3, 7, -kOpen, 0}, {7, 9, 7, 9, -kOpen, 0}}),
            (Slices{{0, 7, 0, 7, -kOpen, 0}, {7, 9, 0, 3, -kOpen, 0}, {7, 9, 7, 9, -kOpen, 0}}));
}

TEST(JoinedSlices, OthersStayAsTheyAre) {
  const Slices apart[] = {{{0, 5, 0, 5}, {0, 5, 6, 9}},                         // a gap between the keys
                          {{0, 5, 0, 5}, {6, 9, 0, 5}},                         // a gap between the rows
                          {{0, 5, 0, 5, -kOpen, 0}, {5, 9, 0, 5, -kOpen, -3}},  // other bands, which cut
                          {{0, 5, 0, 5}, {2, 6, 5, 9}},                         // rows that leave the first one's
                          {{0, 9, 0, 5}, {2, 9, 5, 9}},                    // rows above would see the second one's keys
                          {{0, 9, 0, 9, -kOpen, -1}, {0, 9, 0, 9, 0, 0}},  // two bands of a rectangle
                          {{0, 9, 0, 4, -3, 0}, {4, 9, 4, 9, -4, 0}}};     // windows of two widths
  for (const Slices& slices : apart) EXPECT_EQ(joined_slices(slices), slices);
  EXPECT_EQ(joined_slices({{1, 1, 0, 5}, {0, 2, 0, 2}, {0, 2, 3, 3}}), (Slices{{0, 2, 0, 2}})) << "without empty ones";
  // A window that goes with the stream, over an only child.
  EXPECT_EQ(joined_slices({{0, 9, 0, 4, -3, 0}, {4, 9, 4, 9, -3, 0}}), (Slices{{0, 9, 0, 9, -3, 0}}));
}

TEST(JoinedSlices, AHistoryWithoutBranchesIsADocument) {
  const TreeShape tree = check::even_tree(40, 1, 7);
  EXPECT_EQ(joined_slices(check::tree_slices(tree)), (Slices{{0, 280, 0, 280, -kOpen, 0}}));
}

// A row's keys come in the order of the stream, so that its first slice begins at its root's chain.
TEST(JoinedSlices, TreesShowTheSamePairsInOrder) {
  int fewer = 0, longer = 0;
  for (unsigned long long seed = 0; seed < 400; ++seed) {
    check::RandomChoices choices(seed);
    const TreeShape tree = check::random_tree(choices.pick(1, 30), choices.pick(1, 9),
                                              [&](Index low, Index high) { return choices.pick(low, high); });
    const Index rows = tree.rows() + 2;
    const Slices given = check::tree_slices(tree, 2), joined = joined_slices(given);
    ASSERT_EQ(pairs_of(joined, rows, rows), pairs_of(given, rows, rows)) << seed;
    ASSERT_LE(joined.size(), given.size());
    fewer += joined.size() < given.size();
    longer += joined != given && joined.size() == given.size();
    for (Index q = 0; q < rows; ++q) {
      Index last = -1;
      for (const Slice& s : joined) {
        if (q < s.q_begin || q >= s.q_end) continue;
        ASSERT_GT(s.k_begin, last) << seed;
        last = s.k_begin;
      }
    }
  }
  EXPECT_GT(fewer, 100);
  EXPECT_GT(longer, 10);
}

// A window counts positions on the path, so that each pair of an ancestor and a node has a band of its own. Those of a
// first child are its parent's.
TEST(JoinedSlices, TreesInAWindowShowTheSamePairs) {
  Index given_all = 0, joined_all = 0;
  for (unsigned long long seed = 0; seed < 300; ++seed) {
    check::RandomChoices choices(seed);
    const TreeShape tree = check::random_tree(choices.pick(1, 25), choices.pick(1, 9),
                                              [&](Index low, Index high) { return choices.pick(low, high); });
    const std::vector<check::NodeRows> nodes = check::tree_nodes(tree);
    const Index left = choices.pick(0, 30), rows = tree.rows();
    std::vector<Index> shift;  // position - row
    Slices given;
    for (std::size_t n = 0; n < nodes.size(); ++n) {
      const Index parent = tree.parents[n];
      shift.push_back(parent < 0 ? -nodes[n].begin : nodes[at(parent)].end + shift[at(parent)] - nodes[n].begin);
      for (Index a = static_cast<Index>(n); a >= 0; a = tree.parents[at(a)]) {
        const Index hi = shift[n] - shift[at(a)];
        const Slice s{nodes[n].begin, nodes[n].end, nodes[at(a)].begin, nodes[at(a)].end, hi - left, hi};
        if (touched_keys(s).size() > 0) given.push_back(s);
      }
    }
    const Slices joined = joined_slices(given);
    ASSERT_EQ(pairs_of(joined, rows, rows), pairs_of(given, rows, rows)) << seed;
    given_all += static_cast<Index>(given.size());
    joined_all += static_cast<Index>(joined.size());
  }
  EXPECT_LT(10 * joined_all, 8 * given_all);
}

TEST(JoinedSlices, AnySlicesShowTheSamePairs) {
  int joined_any = 0;
  for (unsigned long long seed = 0; seed < 3000; ++seed) {
    check::RandomChoices c(seed);
    // Cells of a grid, bands that go on from cell to cell or not.
    Slices given;
    const Index rows = c.pick(2, 4), keys = c.pick(2, 4), size = c.pick(1, 6);
    const Index lo = c.one_in(2) ? -kOpen : c.pick(-20, 0), hi = c.one_in(2) ? kOpen : c.pick(lo < -20 ? -20 : lo, 20);
    for (Index i = 0; i < rows; ++i) {
      for (Index j = 0; j < keys; ++j) {
        if (c.one_in(5)) continue;
        Slice s{i * size, (i + (i + 1 < rows && c.one_in(9) ? 2 : 1)) * size, j * size, (j + 1) * size, lo, hi};
        if (c.one_in(3)) s.hi = c.one_in(2) ? kOpen : max_of(is_unlimited(s.lo) ? -20 : s.lo, c.pick(-10, 10));
        if (c.one_in(3)) s.lo = c.one_in(2) ? -kOpen : min_of(s.hi, c.pick(-10, 10));
        if (pairs_of({s}, 30, 30) != std::vector<int>(900, 0)) given.push_back(s);
      }
    }
    const Slices joined = joined_slices(given);
    ASSERT_EQ(pairs_of(joined, 30, 30), pairs_of(given, 30, 30)) << seed;
    ASSERT_LE(joined.size(), given.size());
    for (const Slice& s : joined) ASSERT_LE(s.lo, s.hi);
    joined_any += joined.size() < given.size();
  }
  EXPECT_GT(joined_any, 1000);
}

// Tiles of 32 rows of 4 heads and 128 keys: what they compute that is seen. Nodes of 64 rows fill half a tile of keys
// each, unless they are joined.
TEST(JoinedSlices, ShortNodesFillMoreOfTheirTiles) {
  const auto useful = [](const Slices& slices) {
    const TileWork work = tile_work(slices, 4, 1, {});
    return work.pairs / work.covered;
  };
  const Slices given = check::tree_slices(check::even_tree(10, 2, 64));
  EXPECT_LT(useful(given), 0.5);
  EXPECT_GT(useful(joined_slices(given)), 0.65);
  // Branches of a few rows at each turn of a long history share its tiles: joined no further than that pays.
  for (const bool branch_first : {false, true}) {
    const Slices history = check::tree_slices(check::history_tree(100, 500, 20, branch_first));
    EXPECT_GE(useful(joined_slices(history)), useful(history) * 0.999);
    EXPECT_GT(useful(history), 0.9);
  }
}

TEST(RowPairs, AreTheSumOverSlices) {
  for (unsigned long long seed = 0; seed < 1000; ++seed) {
    check::RandomChoices c(seed);
    Slices slices;
    for (Index n = c.pick(0, 8); n > 0; --n) {
      const Index q = c.pick(0, 30), k = c.pick(0, 30), lo = c.one_in(2) ? -kOpen : c.pick(-40, 40);
      slices.push_back(
          {q, q + c.pick(0, 30), k, k + c.pick(0, 30), lo, c.one_in(2) ? kOpen : max_of(lo, c.pick(-40, 40))});
    }
    const RowPairs pairs(slices);
    for (int n = 0; n < 20; ++n) {
      const Index begin = c.pick(0, 70), end = c.pick(begin, 70);
      Index want = 0;
      for (const Slice& s : slices) {
        const Slice part = within_rows(s, {begin, end});
        if (part.q_begin < part.q_end) want += visible_pairs(part);
      }
      ASSERT_EQ(pairs.of({begin, end}), want) << seed << ": " << begin << " to " << end;
    }
  }
  const RowPairs whole(Slices{{0, kMaxTokens, 0, kMaxTokens, -kOpen, 0}});
  EXPECT_EQ(whole.of({0, kMaxTokens}), kMaxTokens / 2 * kMaxTokens + kMaxTokens);  // kMaxTokens is odd: n(n+1)/2
}

// 20,000 nodes, each below the last, behind a root as long as all of them: their rows all meet, their keys never do.
TEST(OwnSlices, NestedOnesAreCheckedInGoodTime) {
  TreeShape tree;
  Index last = tree.add(-1, 20000);
  for (int n = 0; n < 10000; ++n) {
    const Index next = tree.add(last, 1);
    tree.add(last, 1);
    last = next;
  }
  const Problem p = problem_of(tree);
  EXPECT_EQ(p.mask().slices->size(), 20001u) << "as they were given";
  Index want = 20000 * Index{20001} / 2;
  for (Index depth = 1; depth <= 10000; ++depth) want += 2 * (20000 + depth);
  EXPECT_EQ(p.visible_pairs(), want);
  Slices twice = *p.mask().slices;
  twice.push_back({39999, 40000, 19999, 20000});
  expect_refusal([&] { (void)Problem(p.packing(), {.slices = twice}); }, {"slices 0 ", " and 20001 ", "key 19999"});
}

TEST(OwnSlices, TreesOnManyRanksMakeFewSlices) {
  check::RandomChoices choices(7);
  TreeShape tree;
  for (Index n = 0; n < 3000; ++n) tree.add(n == 0 ? -1 : choices.pick(max_of(0, n - 300), n - 1), choices.pick(1, 40));
  const Stream stream = Stream::from_lengths(std::vector<Index>{tree.rows()}).padded_to(16);
  const Problem p(stream, {.slices = check::tree_slices(tree)});
  const Index slices = static_cast<Index>(p.own_slices().size());
  for (const LayoutKind kind : {LayoutKind::contiguous, LayoutKind::dual_chunk, LayoutKind::zigzag, LayoutKind::striped,
                                LayoutKind::balanced}) {
    SCOPED_TRACE(name(kind));
    const Layout layout = make_layouts(kind, p, 8).q;
    const bool striped = kind == LayoutKind::striped;
    const RunList keys = striped ? layout.rank_order() : layout.sequence_order();
    Index made = 0, pairs = 0, runs = 0;
    const std::vector<Index> by_rank = pairs_by_rank(p, layout);
    for (Index rank = 0; rank < 8; ++rank) {
      const Plan plan = make_plan(p, layout.runs(rank), keys);
      EXPECT_EQ(visible_pairs(plan), by_rank[at(rank)]);
      made += static_cast<Index>(plan.slices.size());
      pairs += by_rank[at(rank)];
      runs += static_cast<Index>(layout.runs(rank).runs().size());
    }
    EXPECT_EQ(pairs, p.visible_pairs());
    // A slice is cut only where a run ends within its rows; a row lies in no more slices than its path has nodes.
    Index deepest = 0;
    std::vector<Index> depth(tree.parents.size(), 1);
    for (std::size_t n = 1; n < depth.size(); ++n) deepest = max_of(deepest, depth[n] = 1 + depth[at(tree.parents[n])]);
    EXPECT_LE(made, striped ? 64 * slices : slices + runs * deepest);
    if (kind == LayoutKind::balanced) {
      EXPECT_LT(imbalance(by_rank), 1.01);
    }
  }
}

}  // namespace
}  // namespace weft
