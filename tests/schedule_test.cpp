// Schedules as values: names, and what make_schedule refuses. What they compute: by_schedule_test, executor_test.
#include "weft/schedule.h"

#include <gtest/gtest.h>

#include "refusal.h"

namespace weft {
namespace {

TEST(Schedule, NamesGoBothWays) {
  for (const KeyOrder order : {KeyOrder::automatic, KeyOrder::rank, KeyOrder::sequence})
    EXPECT_EQ(key_order(name(order)), order) << name(order);
  for (const ScheduleKind kind : schedule_kinds()) EXPECT_EQ(schedule_kind(name(kind)), kind) << name(kind);
}

TEST(Schedule, Refusals) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{64}), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, 2);
  for (const ScheduleKind kind : schedule_kinds())
    for (const Index rank : {-1, 2})
      expect_refusal([&] { make_schedule(problem, layouts, rank, {2, 2}, {.kind = kind}); },
                     {"rank " + std::to_string(rank) + " of 2", "ranks count from 0"});
  for (const Index head : {-1, 2}) {
    const std::vector<Index> map{0, head};
    expect_refusal([&] { make_schedule(problem, layouts, 0, {2, 2, map}); },
                   {"names K/V head " + std::to_string(head) + " of 2"});
  }
}

}  // namespace
}  // namespace weft
