// Simulated ranks that share a processor compute one after another.
#include <gtest/gtest.h>

#include "index.h"
#include "weft/simulate.h"

namespace weft::test {
namespace {

TEST(Simulate, TimeslicesGoFromRankToRank) {
  Machine m{.name = "test", .kernels = {{.dtype = DType::f32, .dim = 8, .flops = 1e9, .call_seconds = 1e-6}}};
  m.levels = {{.name = "memory"}};
  m.processor_ranks = 4;
  const Problem problem(Stream::from_lengths(std::vector<Index>{4096}), {});
  const Layouts layouts = make_layouts(LayoutKind::contiguous, problem, 4);
  const auto ends = [&](double timeslice) {
    m.timeslice = timeslice;
    std::vector<double> all;
    const Job job{problem, layouts, 2, 1, {}, {.dtype = DType::f32, .dim_qk = 8, .dim_v = 8}};
    for (const RankTimes& r : simulate(job, m, Pass::forward).ranks) all.push_back(r.end);
    return all;
  };
  const std::vector<double> together = ends(0), one_by_one = ends(1e6), in_short_turns = ends(together[0] / 200);
  for (Index r = 0; r < 4; ++r) {
    EXPECT_NEAR(one_by_one[at(r)], static_cast<double>(r + 1) / 4 * together[3], 1e-6 * together[3]) << r;
    EXPECT_NEAR(in_short_turns[at(r)], together[at(r)], 0.02 * together[3]) << r;
  }
  EXPECT_NEAR(in_short_turns[3], together[3], 1e-6 * together[3]);
  // Turns of 1e-12 of the time end in good time, too.
  EXPECT_NEAR(ends(together[3] * 1e-12)[3], together[3], 1e-6 * together[3]);

  // Keys of the second head group start when the last rank asks for them, whose turn comes after the others have
  // attended the first.
  m.levels[0].bandwidth = 3.6e5;
  m.exchange_seconds = 1e-6;
  const Job groups{problem, layouts, 2, 2, {.head_groups = 2}, {.dtype = DType::f32, .dim_qk = 8, .dim_v = 8}};
  m.timeslice = 0;
  const double fluid = simulate(groups, m, Pass::forward).seconds;
  m.timeslice = 1e6;
  EXPECT_GT(simulate(groups, m, Pass::forward).seconds, 1.05 * fluid);
}

}  // namespace
}  // namespace weft::test
