// Transports that do wrong and ranks that fail: a right answer or an error on every rank, never a wrong answer, a hang
// or a leak.
#include <string>

#include <gtest/gtest.h>

#include "comm/faulty.h"
#include "index.h"
#include "run/fault_plans.h"

namespace weft::test {
namespace {

using Kind = Fault::Kind;

// Each kind does what its name says, and no more.
TEST(Faulty, CorruptsAFewBytesAlone) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<float> sent(256, 1.0f), got(256, 0.0f);
    const auto block = [](std::vector<float>& x) { return Block{.data = x.data(), .rows = 1, .bytes = 1024}; };
    run_ranks(2, [&](Communicator& comm) {
      const auto faulty = make_faulty(comm, {{.kind = Kind::corrupt, .rank = 0, .call = 0, .seed = seed}});
      if (comm.rank() == 0)
        faulty->exchange({{1, {block(sent)}}}, {}).wait();
      else
        faulty->exchange({}, {{0, {block(got)}}}).wait();
    });
    const auto *a = reinterpret_cast<const char*>(sent.data()), *b = reinterpret_cast<const char*>(got.data());
    Index changed = 0;
    for (Index i = 0; i < 1024; ++i) changed += a[i] != b[i];
    EXPECT_GE(changed, 1) << seed;
    EXPECT_LE(changed, 8) << seed;
  }
}

TEST(Faults, CheckedRanksAreRightOrFail) { check_faulty_schedules(number("WEFT_FAULT_PLANS", 500)); }

TEST(Faults, DelaysAndOrderDoNotMatter) {
  for (const ScheduleKind schedule : schedule_kinds()) {
    Subject& s = subject(schedule);
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
      std::vector<Fault> faults;
      for (std::uint64_t n = 0; n < 8; ++n) {
        const Kind kind = n % 2 == 0 ? Kind::delay : Kind::reorder;
        faults.push_back(make_fault(kind, seed * 100 + n, kRanks, s.calls[0], 0.001));
      }
      const Outcome outcome = s.run(faults, {});
      EXPECT_EQ(outcome.failed(), 0) << name(schedule) << ": " << outcome.error;
      EXPECT_TRUE(s.right(outcome)) << name(schedule) << ", seed " << seed;
    }
  }
}

// The tests above mean something: without checks some of the same faults are wrong answers.
TEST(Faults, UncheckedRanksMayBeWrong) {
  Index wrong = 0;
  Subject& s = subject(ScheduleKind::ring);
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Outcome outcome = s.run({make_fault(Kind::corrupt, seed, kRanks, s.calls[0], 0)}, {});
    wrong += s.right(outcome) ? 0 : 1;
  }
  EXPECT_GT(wrong, 0);
}

TEST(Faults, ARankThatIsTooLateFailsAll) {
  for (const ScheduleKind schedule : schedule_kinds()) {
    Subject& s = subject(schedule);
    const Fault fault{.kind = Kind::delay, .rank = 1, .call = s.calls[1] / 2, .seconds = 1, .seed = 0};
    const Outcome outcome = s.run({fault}, {.checked = true}, 0.3);
    EXPECT_EQ(outcome.failed(), kRanks) << describe(s, fault);
    EXPECT_NE(outcome.error.find("waited 0.3 seconds in call "), std::string::npos) << outcome.error;
    EXPECT_LT(outcome.seconds, 10);
  }
}

TEST(Faults, ARankThatThrowsEndsAll) {
  for (const ScheduleKind schedule : schedule_kinds()) {
    Subject& s = subject(schedule);
    for (std::uint64_t seed = 0; seed < 50; ++seed) {
      const bool checked = seed % 2 == 1;
      const Fault fault = make_fault(Kind::fail, seed, kRanks, s.calls[checked], 0);
      const Outcome outcome = s.run({fault}, {.checked = checked});
      EXPECT_EQ(outcome.error.find("rank " + std::to_string(fault.rank) + ": a planted failure in call " +
                                   std::to_string(fault.call)),
                0u)
          << describe(s, fault) << ": " << outcome.error;
      EXPECT_TRUE(s.right(outcome));
      EXPECT_LT(outcome.seconds, 10);
    }
  }
}

// ---- K/V buffers

TEST(Faults, CheckedKvBuffersAreRightOrFail) { check_faulty_buffers(number("WEFT_FAULT_PLANS", 500) / 2); }

TEST(Faults, UncheckedKvBuffersMayBeWrong) {
  KvSubject s(false, true);
  Index wrong = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed)
    wrong += s.right(s.run({make_fault(Kind::corrupt, seed, kRanks, s.calls[0], 0)}, false)) ? 0 : 1;
  EXPECT_GT(wrong, 0);
}

}  // namespace
}  // namespace weft::test
