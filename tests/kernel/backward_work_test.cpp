// How a backward call is cut for threads: nothing twice, nothing left out, and parts of about equal work.
#include <gtest/gtest.h>

#include "index.h"
#include "kernel/cpu/work.h"

namespace weft::cpu {
namespace {

Index pairs_of(const RowPart& part, const Component& c, const std::vector<Slice>& slices) {
  Index pairs = 0;
  for (const Range& rows : part.blocks) {
    for (const KeyPlace& p : c.slices) {
      Slice s = slices[at(p.slice)];
      s.q_begin = max_of(s.q_begin, rows.begin);
      s.q_end = min_of(s.q_end, rows.end);
      pairs += visible_pairs(s);
    }
  }
  return pairs;
}

Index total_of(const std::vector<Slice>& slices) {
  Index total = 0;
  for (const Slice& s : slices) total += visible_pairs(s);
  return total;
}

void expect_even(const std::vector<Slice>& slices, Index block, Index groups, std::size_t parts) {
  const std::vector<Component> all = components(slices, block, groups);
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].pairs, total_of(slices));
  EXPECT_EQ(all[0].parts.size(), parts);
  Index row = slices.front().q_begin, sum = 0;
  for (const RowPart& part : all[0].parts) {
    const Index pairs = pairs_of(part, all[0], slices);
    sum += pairs;
    EXPECT_LE(pairs, 2 * all[0].pairs / static_cast<Index>(parts));
    EXPECT_GE(2 * pairs, all[0].pairs / static_cast<Index>(parts));
    for (const Range& rows : part.blocks) {
      EXPECT_EQ(rows.begin, row);
      EXPECT_LE(rows.size(), block);
      row = rows.end;
    }
  }
  EXPECT_EQ(row, slices.back().q_end);
  EXPECT_EQ(sum, all[0].pairs);
}

TEST(BackwardWork, OneLongSequenceIsCutIntoSixteenParts) {
  const std::vector<Slice> causal{{0, 4096, 0, 4096, -kUnlimited, 0}};
  expect_even(causal, 32, 1, 16);
  expect_even(causal, 32, 4, 4);
  expect_even(causal, 32, 16, 1);
}

// Rows of two slices, with the same keys behind them.
TEST(BackwardWork, SlicesThatShareKeysAreOneComponent) {
  expect_even({{0, 512, 0, 1024}, {512, 1024, 0, 1024}}, 32, 1, 16);
}

TEST(BackwardWork, DocumentsAreApart) {
  std::vector<Slice> slices;
  for (Index n = 0; n < 5; ++n) slices.push_back({100 * n, 100 * n + 100, 100 * n, 100 * n + 100, -kUnlimited, 0});
  const std::vector<Component> all = components(slices, 32, 1);
  ASSERT_EQ(all.size(), 5u);
  for (std::size_t n = 0; n < 5; ++n) {
    ASSERT_EQ(all[n].slices.size(), 1u);
    EXPECT_EQ(all[n].sum_rows, 100);
    EXPECT_EQ(all[n].slices[0].shift, -100 * static_cast<Index>(n));
    EXPECT_EQ(all[n].keys, (std::vector<Range>{{100 * static_cast<Index>(n), 100 * static_cast<Index>(n) + 100}}));
    EXPECT_EQ(all[n].pairs, 5050);
  }
}

// A part keeps the sums that its rows touch, and no others.
TEST(BackwardWork, PartsOfAWindowTouchItsKeys) {
  const std::vector<Slice> window{{0, 1024, 0, 1024, -63, 0}};
  for (const Component& c : components(window, 32, 1)) {
    for (const RowPart& part : c.parts) {
      EXPECT_EQ(part.sums.begin, max_of(0, part.blocks.front().begin - 63));
      EXPECT_EQ(part.sums.end, part.blocks.back().end);
    }
  }
}

}  // namespace
}  // namespace weft::cpu
