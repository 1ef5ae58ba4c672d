// Work lists as the host makes them: slices of QuerySteps joined, query rows cut into tiles, the order of work.
#include "kernel/cuda/work/list.h"

#include <algorithm>
#include <numeric>
#include <set>

#include <gtest/gtest.h>

#include "check/cases/trees.h"
#include "kernel/attention_problem.h"
#include "kernel/cuda/work/cut.h"

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

// Of a plan for other tensors: every row and key of what is left sees or is seen, and no pair is lost.
TEST(Lists, SlicesPastTheBuffersAreCutOff) {
  Random random(404);
  constexpr Index kRows = 12, kKeys = 10;
  for (int n = 0; n < 20000; ++n) {
    const auto bound = [&] { return random.index(0, 3) == 0 ? kUnlimited : random.index(0, 40) - 20; };
    Slice s{random.index(0, 20), random.index(0, 24), random.index(0, 20), random.index(0, 24), bound(), bound()};
    if (s.lo == kUnlimited) s.lo = -kUnlimited;
    const WorkSlice w = work_slice_within(s, kRows, kKeys);
    const Slice left{w.q_begin, w.q_end, w.k_begin, w.k_end, w.lo, w.hi};
    EXPECT_EQ(pairs_of({left}, kRows, kKeys), pairs_of({s}, kRows, kKeys));
    if (w.q_begin >= w.q_end) continue;
    ASSERT_TRUE(w.q_begin >= 0 && w.q_end <= kRows && w.k_begin >= 0 && w.k_end <= kKeys);
    for (Index q = w.q_begin; q < w.q_end; ++q) {
      bool sees_one = false;
      for (Index k = w.k_begin; k < w.k_end; ++k) sees_one = sees_one || sees(left, q, k);
      EXPECT_TRUE(sees_one) << "row " << q;
    }
    for (Index k = w.k_begin; k < w.k_end; ++k) {
      bool seen = false;
      for (Index q = w.q_begin; q < w.q_end; ++q) seen = seen || sees(left, q, k);
      EXPECT_TRUE(seen) << "key " << k;
    }
  }
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

// --- The arithmetic of the device's lists, word by word ---

// The begins of runs, and those of tiles as the device computes them.
struct Words {
  Words(const std::set<int>& begins, Index row_count, int tile_size, FullTiles full_tiles)
      : rows(static_cast<int>(row_count)), size(tile_size), full(full_tiles) {
    const std::size_t words = at(words_of(rows));
    runs.assign(words, 0), tiles.assign(words, 0), run_before.assign(words, -1), tiles_before.assign(words, 0);
    for (const int b : begins) runs[at(b / kWordRows)] |= RowBits{1} << (b % kWordRows);
    for (std::size_t w = 0; w < words; ++w) {
      const int first = static_cast<int>(w) * kWordRows;
      const auto next = begins.lower_bound(first + kWordRows), before = begins.lower_bound(first);
      run_before[w] = before == begins.begin() ? -1 : *std::prev(before);
      tiles[w] = tiles_of_word(runs.data(), static_cast<int>(w), run_before[w], next == begins.end() ? rows : *next,
                               size, full);
      tiles_before[w] = static_cast<int>(tile_begins.size());
      for (RowBits left = tiles[w]; left != 0; left &= left - 1) tile_begins.push_back(first + lowest_bit(left));
    }
  }
  TileIndex index() const { return {runs.data(), tiles.data(), run_before.data(), tiles_before.data()}; }
  std::vector<Range> ranges() const {
    std::vector<Range> all;
    for (std::size_t t = 0; t < tile_begins.size(); ++t)
      all.push_back({tile_begins[t], t + 1 < tile_begins.size() ? tile_begins[t + 1] : rows});
    return all;
  }
  int rows, size;
  FullTiles full;
  std::vector<RowBits> runs, tiles;
  std::vector<int> run_before, tiles_before, tile_begins;
};

// Every run is whole in one tile or cut into full ones and one that is not; rows find their tiles; and there are no
// more than most_tiles says, of which some problems have nearly all.
TEST(Lists, WordsOfRowsGiveTheTilesOfEachRun) {
  Random random(83);
  Index nearest = kMaxTokens;
  for (int round = 0; round < 4000; ++round) {
    const int size = static_cast<int>(random.chance(0.5) ? random.index(1, 12) : random.index(1, 200));
    const Index longest = random.chance(0.5) ? random.index(1, 2 * size + 2) : random.index(1, 300);
    const FullTiles full = random.chance(0.5) ? FullTiles::from_end : FullTiles::from_begin;
    std::set<int> begins = {0};
    Index rows = 0;
    for (Index n = random.index(1, 40); n > 0; --n) {
      begins.insert(static_cast<int>(rows));
      rows += random.index(1, longest);
    }
    const Words words(begins, rows, size, full);
    const std::vector<Range> tiles = words.ranges();
    ASSERT_EQ(tiles.front().begin, 0);
    const Index held = static_cast<Index>(begins.size()) / 2;  // the others lie between those
    const Index most = most_tiles(rows, size, held, full);
    ASSERT_LE(static_cast<Index>(tiles.size()), most)
        << rows << " rows, " << begins.size() << " runs, tiles of " << size;
    ASSERT_GE(most, ceil_div(rows, size));
    nearest =
        min_of(nearest, full == FullTiles::from_end && size > 2 ? most - static_cast<Index>(tiles.size()) : nearest);
    for (std::size_t t = 0; t < tiles.size(); ++t) {
      const Range& tile = tiles[t];
      ASSERT_LE(tile.size(), size);
      const auto after = begins.upper_bound(static_cast<int>(tile.begin));
      const Index run_begin = *std::prev(after), run_end = after == begins.end() ? rows : *after;
      if (full == FullTiles::from_begin) {
        ASSERT_EQ((tile.begin - run_begin) % size, 0);
        ASSERT_EQ(tile.end, min_of(tile.begin + size, run_end));
      } else if (run_end - run_begin > size) {
        ASSERT_EQ((run_end - tile.end) % size, 0);
        ASSERT_TRUE(tile.begin == run_begin || tile.size() == size);
      } else {
        ASSERT_EQ(tile.begin, run_begin);
        ASSERT_TRUE(tile.end == rows || begins.contains(static_cast<int>(tile.end)));
      }
      for (Index row = tile.begin; row < tile.end; ++row) {
        ASSERT_EQ(words.index().tile_of(static_cast<int>(row)), static_cast<int>(t));
        ASSERT_EQ(words.index().run_of(static_cast<int>(row)), *std::prev(begins.upper_bound(static_cast<int>(row))));
      }
    }
  }
  EXPECT_LE(nearest, 1);
}

// Long documents: what the host cuts.
TEST(Lists, WordsOfRowsGiveTheHostsTiles) {
  Random random(84);
  for (int round = 0; round < 500; ++round) {
    const int size = static_cast<int>(random.index(1, 100));
    std::set<int> begins;
    std::vector<Slice> slices;
    Index rows = 0;
    for (Index n = random.index(1, 10); n > 0; --n) {
      begins.insert(static_cast<int>(rows));
      const Index length = random.index(size + 1, 500);
      slices.push_back({rows, rows + length, rows, rows + length});
      rows += length;
    }
    EXPECT_EQ(Words(begins, rows, size, FullTiles::from_end).ranges(), HostLists(slices).cut_query_tiles(rows, size));
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
