// Schedules by capacity: the same moves as for documents that are known, and plans of the ranks that they name.
#include "weft/capacity.h"

#include <random>
#include <string>

#include <gtest/gtest.h>

#include "index.h"
#include "refusal.h"
#include "text.h"

namespace weft {
namespace {

std::string said_rows(const std::vector<PeerRows>& all) {
  std::string said;
  for (const PeerRows& p : all) {
    said += text(" ", p.peer, ":");
    for (const Range& r : p.rows) said += text(" ", r.begin, "..", r.end);
  }
  return said;
}

std::string said_step(const Step& step) {
  std::string said = text(step.key_rows, " rows, heads ", step.heads_q.begin, "..", step.heads_q.end, " of ",
                          step.heads_k.begin, "..", step.heads_k.end);
  if (!step.move) return said;
  const Move& m = *step.move;
  said += text("; kind ", static_cast<int>(m.kind), m.collective ? " collective" : "", "; to", said_rows(m.sends),
               "; from", said_rows(m.receives), "; home", said_rows(m.home), "; back", said_rows(m.back));
  if (m.relay)
    said += text("; relay of ", m.relay->rows, " to", said_rows(m.relay->sends), " from", said_rows(m.relay->receives),
                 " on", said_rows(m.relay->passes));
  return said;
}

Problem documents(Index tokens, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Index> offsets = {0};
  while (offsets.back() < tokens)  // lengths of whole dual chunks of 4 ranks
    offsets.push_back(min_of(tokens, offsets.back() + 8 * static_cast<Index>(1 + random() % 5)));
  return {Stream::from_cu_seqlens({.cu_seqlens = offsets}), {.causal = true}};
}

TEST(Capacity, MovesAndPlansAreThoseOfKnownDocuments) {
  constexpr Index kRanks = 4, kTokens = 160;
  const std::vector<ScheduleOptions> schedules = {
      {.kind = ScheduleKind::all_gather},
      {.kind = ScheduleKind::all_gather, .head_groups = 2},
      {.kind = ScheduleKind::all_gather, .node = 2},
      {.kind = ScheduleKind::ring},
      {.kind = ScheduleKind::ring, .node = 2},
      {.kind = ScheduleKind::all_to_all},
      {.kind = ScheduleKind::all_to_all, .head_groups = 2},
      {.kind = ScheduleKind::hybrid, .ulysses = 2},
      {.kind = ScheduleKind::hybrid, .head_groups = 2, .ulysses = 2},
      {.kind = ScheduleKind::hybrid, .ulysses = 2, .outer = ScheduleKind::all_gather}};
  unsigned seed = 0;
  for (const ScheduleOptions& options : schedules) {
    for (const LayoutKind kind :
         {LayoutKind::contiguous, LayoutKind::dual_chunk, LayoutKind::zigzag, LayoutKind::striped}) {
      SCOPED_TRACE(words(options) + ", " + std::string(name(kind)));
      const Problem problem = documents(kTokens, ++seed);
      const Layouts layouts = make_layouts(kind, problem, kRanks);
      ScheduleOptions known = options;
      known.key_order = KeyOrder::rank;
      known.ranks_per_step = 1;
      for (Index rank = 0; rank < kRanks; ++rank) {
        const Schedule want = make_schedule(problem, layouts, rank, {4, 2}, known);
        const CapacitySchedule got =
            capacity_schedule({kRanks, rank, kTokens / kRanks, kTokens / kRanks}, {4, 2}, options);
        ASSERT_EQ(got.schedule.steps.size(), want.steps.size());
        ASSERT_EQ(got.met.size(), want.plans.size());
        for (std::size_t n = 0; n < want.steps.size(); ++n) {
          EXPECT_EQ(said_step(got.schedule.steps[n]), said_step(want.steps[n])) << "step " << n;
          EXPECT_EQ(got.schedule.steps[n].plan, want.steps[n].plan);
        }
        for (std::size_t i = 0; i < want.plans.size(); ++i) {
          const Plan plan = make_plan(problem, layouts.q.rank_order(got.met[i].q), layouts.k.rank_order(got.met[i].k));
          EXPECT_EQ(plan.q_rows, got.schedule.plans[i].q_rows);
          EXPECT_EQ(plan.k_rows, got.schedule.plans[i].k_rows);
          EXPECT_EQ(plan.slices, want.plans[i].slices) << "plan " << i;
        }
      }
    }
  }
}

TEST(Capacity, RefusesWhatNeedsLengths) {
  const Capacity rows{4, 0, 8, 8};
  expect_refusal([&] { capacity_schedule(rows, {4, 2}, {.kind = ScheduleKind::exact}); },
                 {"schedule exact", "messages depend on lengths", "all_gather"});
  expect_refusal([&] { capacity_schedule(rows, {4, 2}, {.key_order = KeyOrder::sequence}); },
                 {"sequence order", "lengths are not known"});
}

}  // namespace
}  // namespace weft
