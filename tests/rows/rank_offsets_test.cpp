// Sequences as they lie in one rank's rows: the closed form of the device, and the host's search, against counting.
#include <algorithm>

#include <gtest/gtest.h>

#include "check/cases/random_case.h"
#include "index.h"
#include "refusal.h"
#include "rows/rank_rows.h"
#include "weft/rows.h"

namespace weft {
namespace {

Index tokens_before(const std::vector<Index>& held, Index token) {
  return std::count_if(held.begin(), held.end(), [&](Index t) { return t != kNoToken && t < token; });
}

TEST(RankOffsets, CountTheRowsBefore) {
  for (unsigned long long seed = 0; seed < 400; ++seed) {
    check::RandomChoices choices(seed);
    check::Case c = random_case(choices, static_cast<LayoutKind>(seed % 4));
    c.mask.slices.reset();
    const Problem p = problem_of(c);
    const Layout layout = layouts_of(c, p).q;
    const Stream& stream = layout.stream();
    for (Index rank = 0; rank < layout.ranks(); ++rank) {
      const std::vector<Index> held = layout.tokens(rank);
      const RankOffsets got = cu_seqlens_on_rank(layout, rank);
      const RunsSpec spec =
          runs_spec("query", {layout.kind(), layout.ranks(), layout.rows(), {rank, 1, 1}}, stream.tokens());
      const RankRows rows{spec, rank, stream.extent()};
      Index real = 0;
      for (Index i = 0; i <= stream.sequences(); ++i) {
        const bool last = i == stream.sequences();
        const Range sequence{stream.offsets()[at(i)], stream.offsets()[at(last ? i : i + 1)]};
        const Index begin = tokens_before(held, sequence.begin);
        ASSERT_EQ(got.cu_seqlens_padded[at(i)], begin) << flags(c);
        ASSERT_EQ(rows.before(sequence.begin, sequence), begin) << flags(c);
        ASSERT_EQ(got.cu_seqlens[at(i)], real) << flags(c);
        if (last) continue;
        const Index end = sequence.begin + stream.used(i), count = tokens_before(held, end) - begin;
        ASSERT_EQ(rows.before(end, sequence) - begin, count) << flags(c);
        real += count;
      }
    }
  }
}

TEST(RankOffsets, RefusesRowsOutOfOrder) {
  const Index lengths[] = {8};
  const Layout layout = Layout::explicit_runs(Stream::from_lengths(lengths),
                                              {{{0, 4, 2, 1}, {2, 0, 2, 1}}, {{0, 2, 2, 1}, {2, 6, 2, 1}}});
  EXPECT_EQ(cu_seqlens_on_rank(layout, 1).cu_seqlens, (std::vector<Index>{0, 4}));
  expect_refusal([&] { cu_seqlens_on_rank(layout, 0); }, {"row 2 of rank 0 holds token 0 after token 5"});
}

}  // namespace
}  // namespace weft
