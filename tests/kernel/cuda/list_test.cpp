// Work lists as the host makes them: slices of QuerySteps joined, query rows cut into tiles, the order of work.
#include "kernel/cuda/work/list.h"

#include <algorithm>
#include <numeric>

#include <gtest/gtest.h>

#include "check/cases/trees.h"
#include "kernel/attention_problem.h"

namespace weft::cuda {
namespace {

using test::Random;

std::vector<int> pairs_of(const std::vector<Slice>& slices, Index rows, Index keys) {
  std::vector<int> count(at(rows * keys), 0);
  for (const Slice& s : slices)
    for (Index q = 0; q < rows; ++q)
      for (Index k = 0; k < keys; ++k)
        if (sees(s, q, k)) ++count[at(q * keys + k)];
  return count;
}

// Parts of a document that lie side by side: seen whole, and to the diagonal.
TEST(Lists, PartsSideBySideBecomeOne) {
  const Slice whole{0, 30, 10, 40}, second{0, 30, 40, 70}, causal{0, 30, 40, 70, -kUnlimited, 40};
  EXPECT_EQ(joined(std::vector{whole, second}, true), (std::vector<Slice>{{0, 30, 10, 70}}));
  EXPECT_EQ(joined(std::vector{whole, causal}, true), (std::vector<Slice>{{0, 30, 10, 70, -kUnlimited, 40}}));
  EXPECT_EQ(joined(std::vector{whole, second, {0, 30, 70, 80}}, true), (std::vector<Slice>{{0, 30, 10, 80}}));
  EXPECT_EQ(joined(std::vector{whole, second}, false), (std::vector{whole, second})) << "not of QuerySteps";
}

TEST(Lists, OthersStayApart) {
  const Slice first{0, 30, 10, 40};
  for (const Slice& other : {Slice{0, 30, 41, 70},                   // a gap
                             Slice{0, 29, 40, 70},                   // other rows
                             Slice{0, 30, 40, 70, -kUnlimited, 20},  // a diagonal that would cut the first
                             Slice{0, 30, 40, 70, 12, kUnlimited}})  // a window that the first does not have
    EXPECT_EQ(joined(std::vector{first, other}, true), (std::vector{first, other}));
}

TEST(Lists, JoinedSlicesShowTheSamePairs) {
  Random random(81);
  int fewer = 0;
  for (int round = 0; round < 3000; ++round) {
    const Index rows = 24, keys = 60;
    std::vector<Slice> slices;
    Index key = random.index(0, 4);
    const Index q = random.index(0, 10), end = random.index(q + 1, rows);
    const auto bound = [&] { return random.index(-30, 60); };
    for (Index n = random.index(1, 5); n > 0; --n) {
      const Index size = random.index(1, 11);
      Slice s{q, end, key, key + size};
      if (random.chance(0.3)) s.lo = random.chance(0.5) && !slices.empty() ? slices.back().lo : bound();
      if (random.chance(0.3)) s.hi = random.chance(0.5) && !slices.empty() ? slices.back().hi : bound();
      slices.push_back(s);
      key += size + (random.chance(0.1) ? 1 : 0);
    }
    const std::vector<Slice> fused = joined(slices, true);
    ASSERT_EQ(pairs_of(fused, rows, keys), pairs_of(slices, rows, keys)) << round;
    fewer += fused.size() < slices.size() ? 1 : 0;
  }
  EXPECT_GT(fewer, 300);
}

// Tiles hold all rows in their order; of rows that slices hold together all but the first tile are full.
TEST(Lists, TheFirstTileOfADocumentIsTheOneThatIsNotFull) {
  Random random(82);
  for (int round = 0; round < 500; ++round) {
    const int size = static_cast<int>(random.index(1, 40));
    std::vector<Slice> slices;
    std::vector<Range> documents;
    Index row = random.index(0, 5);
    for (Index n = random.index(1, 6); n > 0; --n) {
      const Index length = random.index(1, 200);
      slices.push_back({row, row + length, row, row + length, -kUnlimited, 0});
      documents.push_back({row, row + length});
      row += length + (random.chance(0.3) ? random.index(1, 50) : 0);
    }
    const std::vector<Range> tiles = HostLists(slices).cut_query_tiles(row, size);
    Index at = 0;
    for (const Range& t : tiles) {
      ASSERT_EQ(t.begin, at);
      ASSERT_LE(t.size(), size);
      ASSERT_GT(t.size(), 0);
      at = t.end;
      for (const Range& d : documents) {
        const bool inside = t.begin > d.begin && t.begin < d.end;
        EXPECT_TRUE(!inside || t.size() == size) << "rows " << t.begin << " to " << t.end;
      }
    }
    EXPECT_EQ(at, row);
  }
}

TEST(Lists, TilesOfADocumentFollowEachOther) {
  // Two documents in four parts: keys 0 to 100 and 100 to 160; each seen by two ranges of rows.
  const std::vector<Slice> slices = {{0, 10, 0, 40, -kUnlimited, 30},
                                     {10, 20, 0, 100, -kUnlimited, 80},
                                     {20, 30, 100, 120, -kUnlimited, 90},
                                     {30, 40, 100, 160, -kUnlimited, 120}};
  HostLists lists(slices);
  ASSERT_EQ(lists.add_tiles(Side::query, 50, 10), 5);
  std::vector<int> order;
  for (int n = 0; n < 5; ++n) order.push_back(lists.tile_at(0, n));
  EXPECT_EQ(order, (std::vector<int>{1, 0, 3, 2, 4}));
}

// Branches of a tree that cost about the same: neighbours follow each other, since they share most of their keys.
TEST(Lists, BranchesOfATreeFollowEachOther) {
  const check::TreeShape tree = check::answers_tree(800, 10, 30);  // costs of the answers: 810, 820, 830, 810, ...
  HostLists lists(check::tree_slices(tree));
  ASSERT_EQ(lists.add_tiles(Side::query, tree.rows(), 10), 110);
  std::vector<int> order;
  for (int n = 0; n < 110; ++n) order.push_back(lists.tile_at(0, n));
  std::vector<int> from_the_end(110);
  std::iota(from_the_end.rbegin(), from_the_end.rend(), 0);
  EXPECT_EQ(order, from_the_end);
}

}  // namespace
}  // namespace weft::cuda
