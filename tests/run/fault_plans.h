// Checked ranks over a transport with planted faults: one fault a run, drawn from a seed.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "comm/faulty.h"
#include "index.h"
#include "prepare/kv_sequences.h"
#include "ranks.h"
#include "weft/error.h"

namespace weft::test {

inline constexpr Index kRanks = 4;

inline Index number(const char* variable, Index otherwise) {  // the soak asks for more
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
    const std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
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
    outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  Index calls[2] = {0, 0};  // unchecked, checked
  Index made = 0;
  std::mutex guard;
};

// A small problem on one schedule, and its answer without faults.
struct Subject : FaultyRanks {
  // `kernel`: also says where the tensors lie.
  explicit Subject(ScheduleKind kind, std::string by = {})
      : kernel(std::move(by)),
        options{.kind = kind},
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

  Outcome run(const std::vector<Fault>& faults, ExecutorOptions how, double time_limit = 60) {
    how.kernel = kernel;
    how.deterministic = true;  // answers are compared to the bit
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

  std::string kernel;
  ScheduleOptions options;
  RanksProblem problem;
  RanksInput input;
  Layouts layouts;
  std::vector<RanksResult> want;
};

inline Subject& subject(ScheduleKind kind, const std::string& kernel = {}) {
  static std::map<std::pair<ScheduleKind, std::string>, std::unique_ptr<Subject>> all;
  std::unique_ptr<Subject>& one = all[{kind, kernel}];
  if (one == nullptr) one = std::make_unique<Subject>(kind, kernel);
  return *one;
}

inline std::string describe(const Subject& s, const Fault& f) {
  return std::string(name(s.options.kind)) + ": " + std::string(name(f.kind)) + " on rank " + std::to_string(f.rank) +
         " in call " + std::to_string(f.call) + ", seed " + std::to_string(f.seed);
}

// Drops are noticed by waiting in vain, at the latest.
inline double time_limit_of(Fault::Kind kind) {
  return kind == Fault::Kind::drop || kind == Fault::Kind::lose ? 0.5 : 60;
}

inline bool harmless(Fault::Kind kind) { return kind == Fault::Kind::delay || kind == Fault::Kind::reorder; }

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
      if (count < 20) continue;                                // too few to say
      EXPECT_GT(3 * noticed_[kind], 2 * count) << name(kind);  // the others hit calls without messages
    }
  }

 private:
  std::map<Fault::Kind, Index> tried_, noticed_, in_part_;
};

// Of the first plan; a soak gives others.
inline Index first_plan() { return number("WEFT_FAULT_SEED", 0); }

// Runs `plans` plans over all schedules and kinds of faults.
inline void check_faulty_schedules(Index plans, const std::string& kernel = {}) {
  CheckedRuns runs;
  for (Index i = first_plan(), end = i + plans; i < end; ++i) {
    const std::span<const ScheduleKind> schedules = schedule_kinds();
    const std::span<const Fault::Kind> kinds = fault_kinds();
    Subject& s = subject(schedules[at(i) % schedules.size()], kernel);
    const Fault::Kind kind = kinds[at(i) / schedules.size() % kinds.size()];
    const Fault fault = make_fault(kind, static_cast<std::uint64_t>(i), kRanks, s.calls[1], 0.002);
    SCOPED_TRACE(describe(s, fault));
    const Outcome outcome = s.run({fault}, {.checked = true}, time_limit_of(kind));
    runs.add(fault, outcome, s.right(outcome));
  }
}

// Micro-sequences through a K/V buffer, forward and backward, and their answer without faults.
struct KvSubject : FaultyRanks {
  // `kernel`: also says where the tensors lie.
  KvSubject(bool drop, bool ahead, std::string by = {})
      : kernel(std::move(by)),
        setting{.lengths = {37, 5, 22, 64},
                .mask = {.causal = true, .left = drop ? 12 : -1},
                .ranks = kRanks,
                .micros = 4,
                .heads_q = 2,
                .heads_k = 1,
                .dim_qk = 8,
                .dim_v = 8,
                .sink = true,
                .drop = drop,
                .ahead = ahead,
                .deterministic = true} {
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
      options.kernel = kernel;
      options.place = check::place_of(kernel);
      KvBuffer buffer(comm, options);
      run_sequence(setting, micros, buffer, comm, outcome.results[at(comm.rank())], options.place);
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

  std::string kernel;
  Setting setting;
  std::vector<Tensors> want;
};

// Runs `plans` plans over buffers of all kinds and all kinds of faults.
inline void check_faulty_buffers(Index plans, const std::string& kernel = {}) {
  std::vector<std::unique_ptr<KvSubject>> subjects;
  for (const bool drop : {false, true})
    for (const bool ahead : {false, true}) subjects.push_back(std::make_unique<KvSubject>(drop, ahead, kernel));
  CheckedRuns runs;
  for (Index i = first_plan(), end = i + plans; i < end; ++i) {
    KvSubject& s = *subjects[at(i) % subjects.size()];
    const Fault::Kind kind = fault_kinds()[at(i) / subjects.size() % fault_kinds().size()];
    const Fault fault = make_fault(kind, static_cast<std::uint64_t>(i), kRanks, s.calls[1], 0.002);
    SCOPED_TRACE(std::string(name(kind)) + " on rank " + std::to_string(fault.rank) + " in call " +
                 std::to_string(fault.call) + ", plan " + std::to_string(i));
    const KvSubject::KvOutcome outcome = s.run({fault}, true, time_limit_of(kind));
    runs.add(fault, outcome, s.right(outcome));
  }
}

}  // namespace weft::test
