// Ranks that die, hang or name other sizes while the calls of all are in queues that nobody waits for, as on GPUs:
// every other rank learns it within the time limit, by name. The queues are counters in memory that the processes
// share.
#include "comm/watch.h"

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <random>
#include <regex>
#include <string>
#include <thread>

#include <gtest/gtest.h>
#include <sys/mman.h>

#include "refusal.h"
#include "said.h"
#include "weft/processes.h"

namespace weft::test {
namespace {

constexpr Index kRanks = 4;
constexpr double kLimit = 1;
using Clock = std::chrono::steady_clock;

struct Shared {
  std::atomic<Index> posted[kRanks];  // calls that a rank has put into its queue
  double seconds[kRanks];             // until then
};

// Zeros that forked processes share.
struct SharedMemory {
  SharedMemory()
      : all(static_cast<Shared*>(
            ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~SharedMemory() { ::munmap(all, sizeof(Shared)); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  Shared* all;
};

// Ends when every rank has come to it, or all is aborted.
struct FakeCall final : detail::QueuedCall {
  FakeCall(const detail::RecordedCall& call, Shared& shared) : QueuedCall(call), memory(shared) {}
  bool begun() override { return true; }
  bool ended() override {
    for (const auto& p : memory.posted)
      if (p <= record.number) return false;
    return true;
  }
  Shared& memory;
};

enum class Harm { none, dies, stops, other_sizes, leaves };

// Makes calls, up to four ahead of the slowest rank, until the end or an Error.
void make_calls(Communicator& c, Shared& shared, Index calls, Harm harm, Index victim, Index when) {
  const auto recorder = std::make_shared<detail::FlightRecorder>();
  std::atomic<bool> aborted = false;
  detail::Watch watch(
      {.rank = c.rank(), .time_limit = kLimit, .recorder = recorder, .board = c.board()->connection(7), .abort = [&] {
         aborted = true;
       }});
  std::vector<float> memory(64);
  for (Index n = 0; n < calls; ++n) {
    const bool now = c.rank() == victim && n == when;
    if (now && harm == Harm::dies) raise(SIGKILL);
    if (now && harm == Harm::stops) raise(SIGSTOP);
    if (now && harm == Harm::leaves) return;
    std::vector<Message> sends, receives;
    for (Index peer = 0; peer < c.ranks(); ++peer) {
      const Index bytes = now && harm == Harm::other_sizes ? 8 : 16;
      sends.push_back({peer, {{memory.data(), 1, 1, bytes}}});
      receives.push_back({peer, {{memory.data(), 1, 1, bytes}}});
    }
    const detail::PassLabel pass("forward");
    detail::label_step(n);
    recorder->begin("exchange", c.rank(), sends, receives);
    const auto call = std::make_shared<FakeCall>(watch.post(sends, receives), shared);
    shared.posted[c.rank()] = n + 1;
    watch.add(call);
    const auto behind = [&] {
      for (const auto& p : shared.posted)
        if (p + 4 <= n) return true;
      return false;
    };
    while (behind() && !aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  watch.finish();  // as a synchronisation of the stream
  watch.check();
}

struct Outcome {
  std::string error;  // of run_processes
  std::string said[kRanks];
  double seconds[kRanks] = {};
};

Outcome run(Harm harm, Index victim, Index when) {
  const SharedMemory memory;
  const Said said(kRanks);
  Outcome outcome;
  outcome.error = error_of([&] {
    run_processes(kRanks,
                  [&](Communicator& c) {
                    const auto begin = Clock::now();
                    try {
                      make_calls(c, *memory.all, 60, harm, victim, when);
                    } catch (const PeerError& e) {
                      memory.all->seconds[c.rank()] = std::chrono::duration<double>(Clock::now() - begin).count();
                      said.put(c.rank(), e.what());
                      throw;
                    }
                  },
                  {.time_limit = kLimit, .grace = 0.5});
  });
  for (Index r = 0; r < kRanks; ++r) {
    outcome.said[r] = said.of(r);
    outcome.seconds[r] = memory.all->seconds[r];
  }
  return outcome;
}

TEST(Watch, CallsThatEndAreNoTrouble) {
  const Outcome outcome = run(Harm::none, 0, 0);
  EXPECT_EQ(outcome.error, "");
}

// Every "call N (forward step N)" of a text has an N up to `last`, and there is one: ranks may hear that another is
// gone before they come to the call that it did not make.
void expect_calls_up_to(Index last, const std::string& text) {
  const std::regex call(R"(call (\d+) \(forward step (\d+)\))");
  int calls = 0;
  for (auto m = std::sregex_iterator(text.begin(), text.end(), call); m != std::sregex_iterator(); ++m, ++calls) {
    EXPECT_LE(std::stoll((*m)[1]), last) << text;
    EXPECT_EQ((*m)[1], (*m)[2]) << text;
  }
  EXPECT_GT(calls, 0) << text;
}

// WEFT_FAILURES: how many ranks are harmed, at random moments.
TEST(Watch, EveryOtherRankNamesTheOneThatFailed) {
  const char* given = std::getenv("WEFT_FAILURES");
  const int failures = given == nullptr ? 8 : std::atoi(given);
  std::mt19937_64 random(5);
  for (int i = 0; i < failures; ++i) {
    const auto harm = static_cast<Harm>(1 + i % 4);
    const auto victim = static_cast<Index>(random() % kRanks), when = static_cast<Index>(random() % 60);
    const std::string name = "rank " + std::to_string(victim);
    SCOPED_TRACE("harm " + std::to_string(i % 4 + 1) + " to " + name + " in call " + std::to_string(when));
    const Outcome outcome = run(harm, victim, when);
    EXPECT_NE(outcome.error, "");
    for (Index r = 0; r < kRanks; ++r) {
      if (r == victim) continue;
      expect_parts(outcome.said[r], {name});
      EXPECT_LT(outcome.seconds[r], kLimit + 5);  // the machine may be busy
    }
    std::string all;
    for (const std::string& s : outcome.said) all += s + "\n";
    const std::string call = "call " + std::to_string(when) + " (forward step " + std::to_string(when) + ")";
    if (harm == Harm::dies) expect_parts(all, {name + " has failed or died while"});
    if (harm == Harm::stops) expect_parts(all, {"for " + name + ", which has given no sign of life for", call});
    if (harm == Harm::other_sizes) expect_parts(all, {call, " sends ", "16", "8", "different problems"});
    if (harm == Harm::leaves) expect_parts(all, {name + " has ended while"});
    if (harm == Harm::dies || harm == Harm::leaves) expect_calls_up_to(when, all);
  }
}

// A rank that lives and does not come: told apart from one that is stopped.
TEST(Watch, ARankThatIsElsewhereIsNamed) {
  const SharedMemory memory;
  const std::string said = error_of([&] {
    run_processes(2,
                  [&](Communicator& c) {
                    const auto recorder = std::make_shared<detail::FlightRecorder>();
                    detail::Watch watch(
                        {.rank = c.rank(), .time_limit = 0.3, .recorder = recorder, .board = c.board()->connection(9)});
                    if (c.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(800));
                    if (c.rank() == 1) return;
                    recorder->begin("exchange", c.rank(), {}, {});
                    watch.add(std::make_shared<FakeCall>(watch.post({}, {}), *memory.all));
                    watch.finish();
                    watch.check();
                  },
                  {.time_limit = 5, .grace = 0.5});
  });
  expect_parts(said, {"rank 0: rank 0 waits in call 0", "for 0.3 s, for rank 1, which has made no call yet"});
}

TEST(Watch, WithoutABoardTheTransportsWordIsAllThereIs) {
  const SharedMemory memory;
  const auto recorder = std::make_shared<detail::FlightRecorder>();
  int aborts = 0;
  detail::Watch watch({.rank = 3,
                       .time_limit = 60,
                       .recorder = recorder,
                       .fault = [] { return std::optional<std::string>("the link is down"); },
                       .abort = [&] { ++aborts; }});
  watch.check();
  recorder->begin("exchange", 3, {}, {});
  watch.add(std::make_shared<FakeCall>(watch.post({}, {}), *memory.all));
  watch.finish();
  EXPECT_FALSE(watch.works());
  EXPECT_EQ(aborts, 1);
  expect_refusal([&] { watch.check(); }, {"rank 3 in call 0: the link is down", "new communicator"});
  expect_refusal([&] { watch.post({}, {}); }, {"the link is down"});
  expect_parts(recorder->text(), {"failed after"});
}

// ---- two ranks of one process and what each sees of the other

struct TwoRanks {
  std::unique_ptr<detail::Board> connect(Index rank, std::uint64_t context, Index first = 0) const {
    return detail::Board(memory, {0, 1}, rank).connection(context, first);
  }
  // As many bytes both ways.
  static void post(detail::Board& board, Index peer, Index call, Index bytes) {
    const Message m{peer, {{nullptr, 1, 1, bytes}}};
    board.post({.number = call, .kind = "exchange"}, {&m, 1}, {&m, 1});
  }
  std::shared_ptr<detail::BoardMemory> memory = std::make_shared<detail::BoardMemory>(2);
};

// One rank may have made more calls over an earlier connection than another when both gave it up.
TEST(Board, CallsOfAConnectionAreComparedByTheirPlaceInIt) {
  const TwoRanks ranks;
  const auto a = ranks.connect(0, 5, 7), b = ranks.connect(1, 5, 3);
  TwoRanks::post(*a, 1, 7, 16);
  TwoRanks::post(*b, 0, 3, 16);
  EXPECT_FALSE(a->mismatch(7));
  EXPECT_FALSE(b->mismatch(3));
  TwoRanks::post(*a, 1, 8, 16);
  TwoRanks::post(*b, 0, 4, 8);
  ASSERT_TRUE(a->mismatch(8) && b->mismatch(4));
  expect_parts(a->mismatch(8)->problem, {"call 8: rank 0 sends 16 bytes to rank 1, which receives 8"});
  expect_parts(b->mismatch(4)->problem, {"call 4: rank 1 sends 8 bytes to rank 0, which receives 16"});
  TwoRanks::post(*a, 1, 9, 16);
  const auto late = a->trouble(9, 0, 1);
  EXPECT_FALSE(late) << late->problem;
  expect_parts(a->trouble(9, 2, 1)->problem, {"rank 0 waits in call 9", "rank 1, which has come to call 8"});
}

TEST(Board, AConnectionSeesNothingOfTheOneBeforeInItsPlace) {
  const TwoRanks ranks;
  for (const bool again : {false, true}) {
    const auto a = ranks.connect(0, again ? 6 : 5), b = ranks.connect(1, again ? 6 : 5);
    TwoRanks::post(*a, 1, 0, again ? 8 : 16);
    EXPECT_FALSE(a->mismatch(0)) << a->mismatch(0)->problem;
    TwoRanks::post(*b, 0, 0, again ? 8 : 16);
    EXPECT_FALSE(a->mismatch(0));
  }
}

// However many give up one after another, each says why the first did.
TEST(Board, TheFirstCauseIsPassedOn) {
  const TwoRanks ranks;
  const auto a = ranks.connect(0, 5), b = ranks.connect(1, 5);
  a->fail({"rank 7 is on fire"});
  const auto found = b->trouble(0, 0, 1);
  ASSERT_TRUE(found && found->consequence);
  EXPECT_EQ(found->problem, "rank 0 gave up while rank 1 waits in call 0: rank 7 is on fire");
  b->fail(*found);
  EXPECT_EQ(a->trouble(0, 0, 1)->problem, "rank 1 gave up while rank 0 waits in call 0: rank 7 is on fire");
}

// A transport tells of a lost peer without its name, maybe long after a call began; the board has it a moment later.
TEST(Watch, TheBoardHasTimeToNameARankThatTheTransportLost) {
  const TwoRanks ranks;
  const SharedMemory memory;
  const auto recorder = std::make_shared<detail::FlightRecorder>();
  std::atomic<bool> lost = false;
  detail::Watch watch({.rank = 0, .time_limit = 60, .recorder = recorder, .board = ranks.connect(0, 5), .fault = [&] {
                         return lost ? std::optional<std::string>("somebody has gone") : std::nullopt;
                       }});
  recorder->begin("exchange", 0, {}, {});
  watch.add(std::make_shared<FakeCall>(watch.post({}, {}), *memory.all));
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  lost = true;
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  ranks.memory->end(1) = static_cast<std::uint64_t>(detail::BoardMemory::End::failed);
  watch.finish();
  expect_refusal([&] { watch.check(); }, {"rank 1 has failed or died while rank 0 waits in call 0"});
}

}  // namespace
}  // namespace weft::test
