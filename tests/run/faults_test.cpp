// Transports that do wrong and ranks that fail: a right answer or an error on every rank, never a wrong answer, a hang
// or a leak.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include <gtest/gtest.h>

#include "comm/faulty.h"
#include "index.h"
#include "prepare/kv_sequences.h"
#include "ranks.h"
#include "weft/error.h"

namespace weft::test {
namespace {

using Kind = Fault::Kind;
using Clock = std::chrono::steady_clock;

constexpr Index kRanks = 4;

Index number(const char* variable, Index otherwise) {  // the soak asks for more
  const char* given = std::getenv(variable);
  return given == nullptr ? otherwise : std::atoll(given);
}

// What comes of one run, rank by rank.
struct Outcome {
  std::vector<RanksResult> results;
  std::vector<bool> done = std::vector<bool>(kRanks, false);
  std::string error;  // the first
  double seconds = 0;

  Index failed() const { return kRanks - std::count(done.begin(), done.end(), true); }
};

// Runs a body on all ranks over a transport with planted faults.
struct FaultyRanks {
  template <class Body>
  void run_body(Outcome& outcome, const std::vector<Fault>& faults, double time_limit, const Body& body) {
    const Clock::time_point begin = Clock::now();
    try {
      run_ranks(kRanks,
                [&](Communicator& comm) {
                  Index calls_here = 0;
                  const std::unique_ptr<Communicator> faulty = make_faulty(comm, faults, &calls_here);
                  body(*faulty);
                  const std::lock_guard lock(guard);
                  outcome.done[at(comm.rank())] = true;
                  made = calls_here;
                },
                {.time_limit = time_limit});
    } catch (const Error& e) {
      outcome.error = e.what();
    }
    outcome.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  }

  Index calls[2] = {0, 0};  // unchecked, checked
  Index made = 0;
  std::mutex guard;
};

// A small problem on one schedule, and its answer without faults.
struct Subject : FaultyRanks {
  explicit Subject(ScheduleKind kind)
      : options{.kind = kind},
        problem{.problem = Problem(Stream::from_lengths(std::vector<Index>{37, 5, 22}).padded_to(8), {.causal = true}),
                .heads_q = 4,
                .heads_k = 2,
                .dim_qk = 8,
                .dim_v = 8,
                .sink = true},
        input(problem),
        layouts(make_layouts(LayoutKind::zigzag, problem.problem, kRanks)) {
    for (const bool checked : {false, true}) {
      Outcome clean = run({}, {.checked = checked});
      EXPECT_EQ(clean.failed(), 0) << clean.error;
      calls[checked] = made;
      if (!checked) want = std::move(clean.results);
    }
  }

  Outcome run(const std::vector<Fault>& faults, const ExecutorOptions& how, double time_limit = 60) {
    Outcome outcome;
    for (Index rank = 0; rank < kRanks; ++rank) outcome.results.push_back(empty_result(problem, kRanks));
    run_body(outcome, faults, time_limit, [&](Communicator& comm) {
      std::mutex mutex;
      run_one_rank(comm, problem, input, layouts, options, how, outcome.results[at(comm.rank())], mutex);
    });
    return outcome;
  }

  // Whether each rank that ended has the answer, to the bit.
  bool right(const Outcome& outcome) const {
    for (Index rank = 0; rank < kRanks; ++rank) {
      if (!outcome.done[at(rank)]) continue;
      if (!same_bytes(outcome.results[at(rank)], want[at(rank)])) return false;
    }
    return true;
  }

  ScheduleOptions options;
  RanksProblem problem;
  RanksInput input;
  Layouts layouts;
  std::vector<RanksResult> want;
};

Subject& subject(ScheduleKind kind) {
  static std::map<ScheduleKind, std::unique_ptr<Subject>> all;
  std::unique_ptr<Subject>& one = all[kind];
  if (one == nullptr) one = std::make_unique<Subject>(kind);
  return *one;
}

std::string describe(const Subject& s, const Fault& f) {
  return std::string(name(s.options.kind)) + ": " + std::string(name(f.kind)) + " on rank " + std::to_string(f.rank) +
         " in call " + std::to_string(f.call) + ", seed " + std::to_string(f.seed);
}

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

// Drops are noticed by waiting in vain, at the latest.
double time_limit_of(Kind kind) { return kind == Kind::drop || kind == Kind::lose ? 0.5 : 60; }

bool harmless(Kind kind) { return kind == Kind::delay || kind == Kind::reorder; }

// Checked runs with one fault each: the answer is right or there is an error, and most faults are noticed.
class CheckedRuns {
 public:
  void add(const Fault& fault, const Outcome& outcome, bool right) {
    EXPECT_TRUE(right) << "a wrong answer; " << outcome.error;
    EXPECT_LT(outcome.seconds, 10);
    if (harmless(fault.kind)) {
      EXPECT_EQ(outcome.failed(), 0) << outcome.error;
    }
    ++tried_[fault.kind];
    noticed_[fault.kind] += outcome.failed() > 0 ? 1 : 0;
    in_part_[fault.kind] += outcome.failed() > 0 && outcome.failed() < kRanks ? 1 : 0;
  }
  ~CheckedRuns() {
    for (const auto& [kind, count] : tried_) {
      std::printf("%-8s %5td plans, %5td ended in errors (%td not on all ranks: some were right and done)\n",
                  std::string(name(kind)).c_str(), count, noticed_[kind], in_part_[kind]);
      if (harmless(kind)) continue;
      EXPECT_GT(3 * noticed_[kind], 2 * count) << name(kind);  // the others hit calls without messages
    }
  }

 private:
  std::map<Kind, Index> tried_, noticed_, in_part_;
};

TEST(Faults, CheckedRanksAreRightOrFail) {
  CheckedRuns runs;
  const Index plans = number("WEFT_FAULT_PLANS", 500);
  for (Index i = 0; i < plans; ++i) {
    const std::span<const ScheduleKind> schedules = schedule_kinds();
    const std::span<const Kind> kinds = fault_kinds();
    Subject& s = subject(schedules[at(i) % schedules.size()]);
    const Kind kind = kinds[at(i) / schedules.size() % kinds.size()];
    const Fault fault = make_fault(kind, static_cast<std::uint64_t>(i), kRanks, s.calls[1], 0.002);
    SCOPED_TRACE(describe(s, fault));
    const Outcome outcome = s.run({fault}, {.checked = true}, time_limit_of(kind));
    runs.add(fault, outcome, s.right(outcome));
  }
}

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

// Micro-sequences through a K/V buffer, forward and backward, and their answer without faults.
struct KvSubject : FaultyRanks {
  KvSubject(bool drop, bool ahead)
      : setting{.lengths = {37, 5, 22, 64},
                .mask = {.causal = true, .left = drop ? 12 : -1},
                .ranks = kRanks,
                .micros = 4,
                .heads_q = 2,
                .heads_k = 1,
                .dim_qk = 8,
                .dim_v = 8,
                .sink = true,
                .drop = drop,
                .ahead = ahead} {
    for (const bool checked : {false, true}) {
      KvOutcome clean = run({}, checked);
      EXPECT_EQ(clean.failed(), 0) << clean.error;
      calls[checked] = made;
      if (checked) {
        EXPECT_TRUE(right(clean));
      } else {
        want = std::move(clean.results);
      }
    }
  }

  struct KvOutcome : Outcome {
    std::vector<Tensors> results;  // of each rank its own: it writes the rows of its windows
  };

  KvOutcome run(const std::vector<Fault>& faults, bool checked, double time_limit = 60) {
    KvOutcome outcome;
    for (Index rank = 0; rank < kRanks; ++rank) outcome.results.emplace_back(setting);
    const MicroSequences micros = micros_of(setting);
    run_body(outcome, faults, time_limit, [&](Communicator& comm) {
      KvBufferOptions options = options_of(setting, micros);
      options.checked = checked;
      KvBuffer buffer(comm, options);
      run_sequence(setting, micros, buffer, comm, outcome.results[at(comm.rank())]);
    });
    return outcome;
  }

  bool right(const KvOutcome& outcome) const {
    for (Index rank = 0; rank < kRanks; ++rank) {
      if (!outcome.done[at(rank)]) continue;
      const Tensors &got = outcome.results[at(rank)], &mine = want[at(rank)];
      for (const auto tensor : {&Tensors::out, &Tensors::lse, &Tensors::dq, &Tensors::dk, &Tensors::dv})
        if ((got.*tensor).bytes != (mine.*tensor).bytes) return false;
      if (got.dsink != mine.dsink || got.max_logit != mine.max_logit) return false;
    }
    return true;
  }

  Setting setting;
  std::vector<Tensors> want;
};

TEST(Faults, CheckedKvBuffersAreRightOrFail) {
  std::vector<std::unique_ptr<KvSubject>> subjects;
  for (const bool drop : {false, true})
    for (const bool ahead : {false, true}) subjects.push_back(std::make_unique<KvSubject>(drop, ahead));
  CheckedRuns runs;
  const Index plans = number("WEFT_FAULT_PLANS", 500) / 2;
  for (Index i = 0; i < plans; ++i) {
    KvSubject& s = *subjects[at(i) % subjects.size()];
    const Kind kind = fault_kinds()[at(i) / subjects.size() % fault_kinds().size()];
    const Fault fault = make_fault(kind, static_cast<std::uint64_t>(i), kRanks, s.calls[1], 0.002);
    SCOPED_TRACE(std::string(name(kind)) + " on rank " + std::to_string(fault.rank) + " in call " +
                 std::to_string(fault.call) + ", plan " + std::to_string(i));
    const KvSubject::KvOutcome outcome = s.run({fault}, true, time_limit_of(kind));
    runs.add(fault, outcome, s.right(outcome));
  }
}

TEST(Faults, UncheckedKvBuffersMayBeWrong) {
  KvSubject s(false, true);
  Index wrong = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed)
    wrong += s.right(s.run({make_fault(Kind::corrupt, seed, kRanks, s.calls[0], 0)}, false)) ? 0 : 1;
  EXPECT_GT(wrong, 0);
}

}  // namespace
}  // namespace weft::test
