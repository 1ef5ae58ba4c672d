// Schedule mesh: queries that other ranks attend, and the states and gradients that come home.
#include <gtest/gtest.h>

#include "exact_ranks.h"
#include "index.h"
#include "ranks.h"
#include "sanitized.h"

namespace weft::test {
namespace {

RanksProblem mesh_problem(const Problem& problem, unsigned seed = 1) {
  return {.problem = problem,
          .heads_q = 4,
          .heads_k = 2,
          .dim_qk = 12,
          .dim_v = 20,
          .softcap = 3,
          .sink = true,
          .seed = seed};
}

// Every side of the mesh, keys of any number of groups a step, and masks where some rows see nothing on some ranks.
TEST(Mesh, EqualsTheReferenceAndTraffic) {
  const std::vector<Index> lengths = {37, 0, 5, 64, 1};
  const Stream stream = Stream::from_lengths(lengths).padded_to(16);
  const std::vector<Problem> problems = {
      Problem(stream, {.causal = true}), Problem(stream, {.causal = true, .left = 5}), Problem(stream, {}),
      Problem(Packing(stream, Stream::from_lengths(std::vector<Index>{31, 12, 40, 3, 9}).padded_to(16)),
              {.causal = true, .align = Align::bottom_right})};
  for (const Problem& problem : problems) {
    const RanksProblem p = mesh_problem(problem);
    RanksInput in(p);
    const Exact want(p, in);
    for (const Index ranks : kSanitized ? std::vector<Index>{6} : std::vector<Index>{1, 2, 3, 4, 6, 8}) {
      for (const LayoutKind kind : {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
        const Layouts layouts = make_layouts(kind, problem, ranks);
        for (Index side = 1; side <= ranks; ++side) {
          for (const Index ranks_per_step : {1, 2, 100}) {
            if (ranks % side != 0) continue;
            const ScheduleOptions options{
                .kind = ScheduleKind::mesh, .ranks_per_step = ranks_per_step, .query_ranks = side};
            SCOPED_TRACE(testing::Message() << ranks << " ranks, " << name(kind) << ", " << words(options));
            const RanksResult r = run_on_ranks(p, in, layouts, options);
            EXPECT_LT(worst_error(r, want, true), 2e-6);
            for (Index rank = 0; rank < ranks; ++rank) {
              const Schedule s = make_schedule(problem, layouts, rank, {4, 2}, options);
              const TensorShape shape{.dim_qk = 12, .dim_v = 20, .max_logit = true, .dsink = true};
              EXPECT_EQ(r.forward[at(rank)], traffic(s, shape, Pass::forward));
              EXPECT_EQ(r.backward[at(rank)], traffic(s, shape, Pass::backward));
            }
          }
        }
      }
    }
  }
}

// States are merged and gradients added in a fixed order; in bf16 each result is rounded once, so that it is as exact
// as that of one rank.
TEST(Mesh, HasTheSameBitsOnEveryRun) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{300, 77, 410}).padded_to(16), {.causal = true});
  for (const DType dtype : {DType::f32, DType::bf16}) {
    RanksProblem p = mesh_problem(problem);
    p.dtype = dtype;
    RanksInput in(p);
    const Exact want(p, in);
    const RanksResult alone = run_on_ranks(p, in, make_layouts(LayoutKind::zigzag, problem, 1), {});
    for (const Index side : {2, 4}) {
      const ScheduleOptions options{.kind = ScheduleKind::mesh, .ranks_per_step = 1, .query_ranks = side};
      const auto run = [&](bool checked) {
        return run_on_ranks(p, in, make_layouts(LayoutKind::zigzag, problem, 4), options,
                            {.deterministic = true, .checked = checked});
      };
      const RanksResult first = run(false);
      EXPECT_LT(worst_error(first, want, true), 1.05 * worst_error(alone, want, true) + 1e-6);
      for (int i = 0; i < (kSanitized ? 1 : 5); ++i) EXPECT_TRUE(same_bytes(run(i == 1), first)) << side;
    }
  }
}

}  // namespace
}  // namespace weft::test
