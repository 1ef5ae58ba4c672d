// Ranks that are given different problems, options or calls, without `checked`: every rank ends with an Error, and what
// differs is named with the rank. Over MPI: tests/comm/mpi/mpi_test.cpp; over gloo: python/tests/distributed.
#include <array>
#include <string>

#include <gtest/gtest.h>

#include "comm/sign.h"
#include "disagreements.h"
#include "prepare/kv_sequences.h"
#include "refusal.h"
#include "said.h"
#include "weft/processes.h"

namespace weft::test {
namespace {

constexpr Index kOddOne = 1;

std::vector<ScheduleOptions> of_every_kind() {
  std::vector<ScheduleOptions> all;
  for (const ScheduleKind kind : schedule_kinds()) all.push_back({.kind = kind});
  all.push_back({.kind = ScheduleKind::all_gather, .head_groups = 2, .node = 2});
  return all;
}

bool swaps(ScheduleKind kind) { return kind == ScheduleKind::all_to_all || kind == ScheduleKind::hybrid; }

void expect_named(const std::vector<std::string>& said, const Disagreement& way) {
  bool named = false;
  for (std::size_t r = 0; r < said.size(); ++r) {
    EXPECT_NE(said[r], "") << "rank " << r << " was not told";
    named = named || (said[r].find(way.said) != std::string::npos &&
                      (said[r].find("rank 1 ") != std::string::npos || said[r].find(" and 1 ") != std::string::npos ||
                       said[r].find("ranks 1 and") != std::string::npos));
  }
  EXPECT_TRUE(named) << said[0] << "\n" << said[kOddOne];
}

class Disagrees : public testing::TestWithParam<std::size_t> {
 protected:
  const Disagreement& way() const { return disagreements()[GetParam()]; }
};
std::string name_of(const testing::TestParamInfo<std::size_t>& info) {
  std::string name = disagreements()[info.param].name;
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  return name;
}
INSTANTIATE_TEST_SUITE_P(Ways, Disagrees, testing::Range(std::size_t{0}, disagreements().size()), name_of);

TEST_P(Disagrees, OverThreads) {
  for (const ScheduleOptions& how : of_every_kind()) {
    if (way().swapped && !swaps(how.kind)) continue;
    constexpr Index kThreads = 4;
    SCOPED_TRACE(std::string(name(how.kind)));
    std::vector<std::string> said(kThreads);
    const std::string thrown = error_of([&] {
      run_ranks(kThreads,
                [&](Communicator& c) {
                  try {
                    run_task(c, task_of(way(), how, c.rank(), kOddOne));
                  } catch (const Error& e) {
                    said[index(c.rank())] = e.what();
                    throw;
                  }
                },
                {.time_limit = 5});
    });
    EXPECT_NE(thrown, "");
    expect_named(said, way());
  }
}

// A rank that has seen the difference, caught the error and gone on elsewhere has left for those that it owes a
// message.
TEST(DisagreesInPass, IsNamedWhereARankHasLeft) {
  std::string told;
  run_ranks(2, [&](Communicator& c) {
    detail::CallSign sign;
    sign.parts[detail::CallSign::mask] = c.rank() == 1 ? 7 : 8;
    const detail::SignedPass pass(c, sign, detail::PassKind::forward);
    float x = 0;
    if (c.rank() == 0)
      told = error_of([&] { c.exchange({}, {{1, {{.data = &x, .rows = 1, .bytes = sizeof x}}}}).wait(); });
  });
  EXPECT_NE(told.find("ranks 0 and 1 differ in the mask"), std::string::npos) << told;
  EXPECT_NE(told.find("rank 1 has left"), std::string::npos) << told;
}

TEST_P(Disagrees, OverProcesses) {
  constexpr Index kForks = 3;
  constexpr std::array kKinds{ScheduleKind::all_gather, ScheduleKind::ring, ScheduleKind::all_to_all,
                              ScheduleKind::exact};
  const ScheduleKind kind = way().swapped ? ScheduleKind::all_to_all : kKinds[GetParam() % kKinds.size()];
  SCOPED_TRACE(std::string(name(kind)));
  const Said said(kForks);
  const std::string thrown = error_of([&] {
    run_processes(kForks,
                  [&](Communicator& c) {
                    try {
                      run_task(c, task_of(way(), {.kind = kind}, c.rank(), kOddOne));
                    } catch (const Error& e) {
                      said.put(c.rank(), e.what());
                      throw;
                    }
                  },
                  {.time_limit = 2, .grace = 2});
  });
  EXPECT_NE(thrown, "");
  expect_named({said.of(0), said.of(1), said.of(2)}, way());
}

TEST(Agree, RanksThatAgreeAreNotDisturbedAndBytesAreNotCounted) {
  for (const Disagreement& way : disagreements()) {
    for (const ScheduleOptions& how : of_every_kind())
      EXPECT_EQ(error_of([&] {
                  run_ranks(4, [&](Communicator& c) { run_task(c, task_of(way, how, 0, kOddOne)); },
                            {.time_limit = 20});
                }),
                "")
          << way.name << ", " << name(how.kind);
  }
}

// A scale that is left out is the one that others may give.
TEST(Agree, OnAScaleThatIsTheDefault) {
  run_ranks(2, [](Communicator& c) {
    RankTask task;
    if (c.rank() == 1) task.scale = 1 / std::sqrt(8.0);
    run_task(c, task);
  });
}

TEST(CallSign, GoesThroughText) {
  detail::CallSign sign;
  EXPECT_FALSE(detail::sign_from_text(detail::to_text(sign)));  // of no pass
  for (std::size_t p = 0; p < detail::CallSign::kParts; ++p)
    sign.parts[p] = 0xfffffff0u + static_cast<std::uint32_t>(p);
  EXPECT_EQ(detail::sign_from_text(detail::to_text(sign)), sign);
  for (const char* wrong : {"", "1", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "1:2:3:4:5:6:7:x", "1:2:3:4:5:6:7:8 "})
    EXPECT_FALSE(detail::sign_from_text(wrong)) << wrong;
}

TEST(CallSign, NamesTheFewer) {
  detail::CallSign mine, other;
  mine.parts[detail::CallSign::pass] = other.parts[detail::CallSign::pass] = 4 * 7 + 1;
  other.parts[detail::CallSign::mask] = 1;
  const auto said = [&](const std::vector<detail::RankSign>& others) {
    return detail::disagreement(2, mine, others).value_or("");
  };
  EXPECT_EQ(said({{0, mine}, {1, mine}}), "");
  EXPECT_EQ(said({{0, other}}), "ranks 0 and 2 differ in the mask");
  EXPECT_EQ(said({{0, mine}, {1, other}, {3, mine}}), "rank 1 differs from ranks 0, 2, 3 in the mask");
  EXPECT_EQ(said({{0, other}, {1, other}, {3, other}}), "rank 2 differs from ranks 0, 1, 3 in the mask");
  other.parts[detail::CallSign::pass] = 4 * 8;
  EXPECT_EQ(said({{0, other}, {1, mine}}), "rank 0 is in pass 8, a forward, and ranks 1, 2 in pass 7, a backward");
  EXPECT_FALSE(detail::disagreement_in_pass(2, mine, std::vector<detail::RankSign>{{0, other}}));
}

}  // namespace
}  // namespace weft::test
