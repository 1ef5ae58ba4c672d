// Copies of rows: between sequence order and rank order, and between a step and its rank.
#include <algorithm>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "check/definition.h"
#include "index.h"
#include "refusal.h"
#include "rows/dual_chunk_case.h"
#include "weft/rows.h"

namespace weft {
namespace {

using test::dual_chunk_case;
using test::piece_of;
using Indices = std::vector<Index>;

constexpr int kPoison = -7;

// Rows of two ints, packed or with a gap between rows; gaps are poisoned too.
struct Rows {
  Rows(Index rows, bool spread) : width(spread ? 5 : 2), data(at(rows * width + 1), kPoison) {
    tensor = {.data = data.data(), .rows = rows, .row_bytes = 8, .row_stride = spread ? 20 : 0};
  }
  Rows(const Rows&) = delete;
  int& operator()(Index row) { return data[at(row * width)]; }
  void number() {
    for (Index row = 0; row < tensor.rows; ++row) {
      data[at(row * width)] = static_cast<int>(row);
      data[at(row * width + 1)] = static_cast<int>(1000 + row);
    }
  }
  // Row `row` is row `from` of a numbered tensor, or untouched for -1.
  bool is(Index row, Index from) const {
    const std::size_t i = at(row * width);
    return from < 0 ? data[i] == kPoison && data[i + 1] == kPoison : data[i] == from && data[i + 1] == 1000 + from;
  }
  bool gaps_untouched() const {
    for (std::size_t i = 0; i < data.size(); ++i)
      if (i % at(width) >= 2 && data[i] != kPoison) return false;
    return data.back() == kPoison;
  }

  Index width;
  std::vector<int> data;
  RowTensor tensor;
};

TEST(Orders, EveryLayout) {
  for (unsigned long long seed = 0; seed < 1200; ++seed) {
    check::RandomChoices choices(seed);
    const check::Case c = random_case(choices);
    SCOPED_TRACE(flags(c));
    const Layout layout = layouts_of(c, problem_of(c)).q;
    const Index tokens = layout.stream().tokens();
    Indices wanted;  // tokens in rank order
    for (Index r = 0; r < c.ranks; ++r)
      for (const Index t : layout.tokens(r)) wanted.push_back(t);
    EXPECT_EQ(sequence_rows_of_rank_order(layout), wanted);
    const Indices back = rank_rows_of_sequence_order(layout);
    ASSERT_EQ(back.size(), at(tokens));
    for (Index t = 0; t < tokens; ++t) {
      const auto found = std::find(wanted.begin(), wanted.end(), t);
      EXPECT_EQ(back[at(t)], found == wanted.end() ? kNoRow : found - wanted.begin());
    }

    const bool spread = seed % 2;
    const Index rows = static_cast<Index>(wanted.size());
    Rows sequence(tokens, spread), ranks(rows, seed % 4 < 2), again(tokens, spread);
    sequence.number();
    sequence_to_rank_order(layout, sequence.tensor, ranks.tensor);
    for (Index r = 0; r < rows; ++r) EXPECT_TRUE(ranks.is(r, wanted[at(r)])) << "row " << r;
    EXPECT_TRUE(ranks.gaps_untouched());
    rank_to_sequence_order(layout, ranks.tensor, again.tensor);
    for (Index t = 0; t < tokens; ++t) EXPECT_TRUE(again.is(t, back[at(t)] == kNoRow ? -1 : t)) << "token " << t;
    EXPECT_TRUE(again.gaps_untouched());
    // Before the first offset and past the last sequence.
    const Range dealt = layout.stream().extent();
    for (Index t = 0; t < tokens && layout.kind() != LayoutKind::explicit_runs; ++t)
      EXPECT_EQ(back[at(t)] == kNoRow, t < dealt.begin || t >= dealt.end);

    Rows other(rows, spread), round(rows, spread);  // and from rank order there and back
    other.number();
    rank_to_sequence_order(layout, other.tensor, again.tensor);
    sequence_to_rank_order(layout, again.tensor, round.tensor);
    for (Index r = 0; r < rows; ++r) EXPECT_TRUE(round.is(r, wanted[at(r)] == kNoToken ? -1 : r)) << "row " << r;
    if (HasFailure()) return;
  }
}

// Halves of a rank's output, packed or in place, become the rank's rows, and gradients go the other way.
TEST(StepRows, ThereAndBack) {
  for (unsigned long long seed = 0; seed < 800; ++seed) {
    const check::Case c = dual_chunk_case(seed);
    SCOPED_TRACE(flags(c));
    const check::Definition definition(c);
    const Problem problem = problem_of(c);
    const Layout layout = Layout::dual_chunk(problem.packing().q(), c.ranks);
    const bool spread = seed % 2, packed = seed % 3;
    for (Index rank = 0; rank < c.ranks; ++rank) {
      const Indices tokens = layout.tokens(rank);
      const std::set<Index> pieces[] = {piece_of(layout.stream(), c.ranks, rank),
                                        piece_of(layout.stream(), c.ranks, 2 * c.ranks - 1 - rank)};
      Rows rank_rows(layout.rows(), spread), merged(layout.rows(), !spread);
      rank_rows.number();
      for (Index s = 0; s < 2; ++s) {
        const VarlenStep step = all_gather_step(problem, layout, rank, s);
        Indices valid;  // the rank's rows with a real token of this half
        for (Index r = 0; r < layout.rows(); ++r)
          if (definition.q(tokens[at(r)]).real() && pieces[s].contains(tokens[at(r)])) valid.push_back(r);
        EXPECT_EQ(rank_rows_of_packed_step(step), valid);
        EXPECT_EQ(step.cu_seqlens_q.back(), static_cast<Index>(valid.size()));

        const Indices& offsets = packed ? step.cu_seqlens_q : step.cu_seqlens_q_padded;
        Rows step_rows(offsets.back(), spread);
        rank_to_step_rows(step, rank_rows.tensor, step_rows.tensor, offsets);
        for (Index r = 0, next = 0; r < step_rows.tensor.rows; ++r) {
          const bool is_valid = packed || std::find(valid.begin(), valid.end(), r) != valid.end();
          EXPECT_TRUE(step_rows.is(r, is_valid ? valid[at(next++)] : -1)) << "row " << r;
        }
        EXPECT_TRUE(step_rows.gaps_untouched());
        step_to_rank_rows(step, step_rows.tensor, offsets, merged.tensor);
        for (Index r = 0; r < layout.rows() && s == 0; ++r)
          EXPECT_TRUE(merged.is(r, std::find(valid.begin(), valid.end(), r) != valid.end() ? r : -1)) << "row " << r;
      }
      // Both halves together: all valid rows, padding as it was.
      for (Index r = 0; r < layout.rows(); ++r)
        EXPECT_TRUE(merged.is(r, definition.q(tokens[at(r)]).real() ? r : -1)) << "row " << r;
      EXPECT_TRUE(merged.gaps_untouched());
    }
    if (HasFailure()) return;
  }
}

// The second half of the queries, as a ring's tiles above the diagonal compute it.
TEST(StepRows, RingTileAbove) {
  const Indices padded{0, 8}, used{7};
  const Problem problem(Stream::from_used(padded, used), {.causal = true});
  const Layout layout = Layout::dual_chunk(problem.packing().q(), 2);
  const VarlenStep step = ring_step(problem, layout, 0, 1);
  EXPECT_EQ(rank_rows_of_packed_step(step), (Indices{2}));  // row 3 is padding
  Rows packed(1, false), rank_rows(4, false);
  packed.number();
  step_to_rank_rows(step, packed.tensor, step.cu_seqlens_q, rank_rows.tensor);
  for (Index r = 0; r < 4; ++r) EXPECT_TRUE(rank_rows.is(r, r == 2 ? 0 : -1));
}

TEST(Orders, Refusals) {
  const Indices offsets{1, 9}, used{8};
  const Layout layout = Layout::dual_chunk(Stream::from_used(offsets, used, 10), 2);
  Rows sequence(10, false), ranks(8, false);
  const auto call = [&](auto change) {
    return [&, change] {
      RowTensor a = sequence.tensor, b = ranks.tensor;
      change(a, b);
      sequence_to_rank_order(layout, a, b);
      rank_to_sequence_order(layout, b, a);
    };
  };
  EXPECT_NO_THROW(call([](RowTensor&, RowTensor&) {})());
  expect_refusal(call([](RowTensor& a, RowTensor&) { a.rows = 8; }), {"sequence has 8 rows", "10"});
  expect_refusal(call([](RowTensor&, RowTensor& b) { b.rows = 4; }), {"ranks has 4 rows", "8"});
  expect_refusal(call([](RowTensor&, RowTensor& b) { b.row_bytes = 4; }), {"ranks has rows of 4 bytes", "8"});
  expect_refusal(call([](RowTensor& a, RowTensor&) { a.data = nullptr; }), {"sequence has no data"});
  expect_refusal(call([](RowTensor& a, RowTensor& b) { b.data = a.data; }), {"the same buffer", "two"});
}

TEST(StepRows, Refusals) {
  const Problem problem(Stream::from_lengths(Indices{8, 4}), {.causal = true});
  const Layout layout = Layout::dual_chunk(problem.packing().q(), 2);
  VarlenStep step = all_gather_step(problem, layout, 0, 1);
  Rows packed(3, false), rank_rows(6, false), small(2, false);
  EXPECT_NO_THROW(step_to_rank_rows(step, packed.tensor, step.cu_seqlens_q, rank_rows.tensor));
  expect_refusal([&] { step_to_rank_rows(step, small.tensor, step.cu_seqlens_q, rank_rows.tensor); },
                 {"entry 1: 1 rows from row 2", "2 rows of step_rows"});
  expect_refusal([&] { rank_to_step_rows(step, packed.tensor, packed.tensor, step.cu_seqlens_q); },
                 {"rank_rows has 3 rows, expected 6"});
  expect_refusal([&] { step_to_rank_rows(step, packed.tensor, Indices{0, 2}, rank_rows.tensor); },
                 {"2 offsets in step_rows", "2 entries", "give 3"});
  expect_refusal([&] { step_to_rank_rows(step, packed.tensor, Indices{0, -1, 3}, rank_rows.tensor); }, {"from row -1"});
  expect_refusal([&] { step_to_rank_rows(step, packed.tensor, Indices{INT64_MAX, 0, 3}, rank_rows.tensor); },
                 {"entry 0: 2 rows"});
  step.seqused_q.pop_back();
  expect_refusal([&] { (void)rank_rows_of_packed_step(step); }, {"2 entries", "1 seqused_q", "give 2"});
  step.seqused_q.push_back(1);
  step.lo.clear();
  expect_refusal([&] { (void)slices(step); }, {"2 entries", "0 lo"});
}

}  // namespace
}  // namespace weft
