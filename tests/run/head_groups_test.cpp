// Swaps of heads, head group by head group, on ranks that are threads.
#include <atomic>

#include <gtest/gtest.h>

#include "exact_ranks.h"
#include "index.h"
#include "ranks.h"
#include "sanitized.h"

namespace weft::test {
namespace {

const std::vector<Index> kLengths = {37, 0, 5, 64, 1};

// Where several groups share K/V heads, heads do not divide, or some ranks have none.
TEST(HeadGroups, EqualTheReferenceAndOneGroup) {
  for (const auto& [heads_q, heads_k] : {std::pair<Index, Index>{8, 8}, {8, 2}, {6, 1}, {6, 3}, {5, 5}, {2, 2}}) {
    const RanksProblem p{.problem = Problem(Stream::from_lengths(kLengths).padded_to(16), {.causal = true}),
                         .heads_q = heads_q,
                         .heads_k = heads_k,
                         .dim_qk = 12,
                         .dim_v = 20,
                         .softcap = 3,
                         .sink = true};
    RanksInput in(p);
    const Exact want(p, in);
    for (const Index ranks : kSanitized ? std::vector<Index>{4} : std::vector<Index>{2, 3, 4}) {
      std::vector<ScheduleOptions> all;
      for (const Index groups : {2, 3, 8}) {
        if (groups <= heads_q) all.push_back({.kind = ScheduleKind::all_to_all, .head_groups = groups});
        if (ranks != 4 || groups > heads_k) continue;
        for (const ScheduleKind outer : {ScheduleKind::ring, ScheduleKind::all_gather})
          all.push_back({.kind = ScheduleKind::hybrid, .head_groups = groups, .ulysses = 2, .outer = outer});
      }
      const Layouts layouts = make_layouts(LayoutKind::zigzag, p.problem, ranks);
      for (const ScheduleOptions& options : all) {
        SCOPED_TRACE(testing::Message() << heads_q << ":" << heads_k << " " << ranks << " ranks " << words(options));
        ScheduleOptions at_once = options;
        at_once.head_groups = 1;
        const RanksResult r = run_on_ranks(p, in, layouts, options), whole = run_on_ranks(p, in, layouts, at_once);
        EXPECT_LT(worst_error(r, want, true), 2e-6);
        EXPECT_EQ(r.out.bytes, whole.out.bytes);
        EXPECT_EQ(r.lse.bytes, whole.lse.bytes);
        EXPECT_EQ(r.dq.bytes, whole.dq.bytes);
        for (Index rank = 0; rank < ranks; ++rank) {
          const Schedule s = make_schedule(p.problem, layouts, rank, {heads_q, heads_k}, options);
          const TensorShape shape{.dim_qk = 12, .dim_v = 20, .max_logit = true, .dsink = true};
          EXPECT_EQ(r.forward[at(rank)], traffic(s, shape, Pass::forward));
          EXPECT_EQ(r.backward[at(rank)], traffic(s, shape, Pass::backward));
        }
      }
    }
  }
}

// Two head groups at a time: one is computed, another is on its way.
TEST(HeadGroups, TakeAFractionOfTheMemory) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{512}), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, 2);
  Index bytes[2] = {};
  for (const Index groups : {1, 8}) {
    std::atomic<Index> most = 0;
    run_ranks(2, [&](Communicator& comm) {
      const ScheduleOptions options{.kind = ScheduleKind::all_to_all, .head_groups = groups};
      Executor executor(comm, make_schedule(problem, layouts, comm.rank(), {16, 16}, options));
      executor.forward(RankTensors<>(256, 16, 8, 1).args().forward);
      most = max_of(most, executor.workspace_bytes());
    });
    bytes[groups == 1 ? 0 : 1] = most;
  }
  EXPECT_NEAR(static_cast<double>(bytes[1]), 2.0 / 8 * static_cast<double>(bytes[0]), 1024);
}

}  // namespace
}  // namespace weft::test
