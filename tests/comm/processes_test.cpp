// Ranks that are forked processes: what they exchange, and how they end. A failed expectation in a rank becomes its
// failure, because the process that runs the tests does not see it.
#include "weft/processes.h"

#include <chrono>
#include <csignal>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include <gtest/gtest.h>
#include <unistd.h>

#include "comm/letters.h"
#include "refusal.h"

namespace weft::test {
namespace {

void run(Index ranks, const std::function<void(Communicator&)>& body, const ProcessRanks& how = {}) {
  run_processes(
      ranks,
      [&](Communicator& c) {
        body(c);
        if (testing::Test::HasFailure()) throw std::runtime_error("an expectation failed, see above");
      },
      how);
}

TEST(Processes, RandomExchanges) {
  for (const Index ranks : {1, 2, 4}) {
    run(ranks, [](Communicator& c) {
      EXPECT_EQ(c.name(), "processes");
      for (std::uint64_t seed = 0; seed < 100 && !testing::Test::HasFailure(); ++seed) {
        Random random(seed);
        exchange_letters(c, random_calls(random, c.ranks()), seed);
      }
    });
  }
}

TEST(Processes, MessagesLongerThanASocketHolds) {
  run(3, [](Communicator& c) {
    const Index next = (c.rank() + 1) % c.ranks(), last = (c.rank() + c.ranks() - 1) % c.ranks();
    std::vector<float> held = values(2'000'000, 4, c.rank()), coming(held.size());
    c.send_receive(next, block(held), last, block(coming)).wait();
    EXPECT_EQ(coming, values(2'000'000, 4, last));
  });
}

TEST(Processes, SplitsIntoAMesh) {
  run(6, [](Communicator& c) {
    const std::unique_ptr<Communicator> row = c.split(c.rank() / 3, c.rank()),
                                        column = c.split(c.rank() % 3, -c.rank());
    double along = static_cast<double>(c.rank()), across = along;
    Request first = row->all_reduce(&along, DType::f64, 1, Reduce::sum);
    column->all_reduce(&across, DType::f64, 1, Reduce::sum).wait();  // both in flight over the same sockets
    first.wait();
    EXPECT_EQ(along, static_cast<double>(c.rank() / 3 * 9 + 3));
    EXPECT_EQ(across, static_cast<double>(c.rank() % 3 * 2 + 3));
    EXPECT_EQ(column->rank(), 1 - c.rank() / 3);
    const std::unique_ptr<Communicator> alone = row->split(row->rank(), 0);
    EXPECT_EQ(alone->ranks(), 1);
  });
}

TEST(Processes, RequestsThatNobodyWaitsForAreWithdrawn) {
  run(2, [](Communicator& c) {
    std::vector<float> sent = values(1000, 1, c.rank()), dropped(1000, 7), got(1000);
    {
      const Request request = c.send_receive(1 - c.rank(), block(sent), 1 - c.rank(), block(dropped));
    }
    c.send_receive(1 - c.rank(), block(sent), 1 - c.rank(), block(got)).wait();
    EXPECT_EQ(dropped, std::vector<float>(1000, 7));
    EXPECT_EQ(got, values(1000, 1, 1 - c.rank()));
  });
}

// ---- ranks that fail

void wait_for_all(Communicator& c) {
  double one = 1;
  c.all_reduce(&one, DType::f64, 1, Reduce::sum).wait();
}

TEST(Processes, TheFirstFailureIsNamed) {
  expect_refusal(
      [] {
        run(4, [](Communicator& c) {
          if (c.rank() == 2) throw Error("no rows", "give some");
          wait_for_all(c);
        });
      },
      {"rank 2: no rows"});
  expect_refusal(
      [] {
        run(3, [](Communicator& c) {
          if (c.rank() == 1) raise(SIGKILL);
          wait_for_all(c);
        });
      },
      {"rank 1: was ended by signal 9"});
}

TEST(Processes, ARankThatIsStoppedWhileAllOthersEndIsKilled) {
  expect_refusal(
      [] {
        run(3,
            [](Communicator& c) {
              if (c.rank() == 1) raise(SIGSTOP);
            },
            {.grace = 0.3});
      },
      {"rank 1: was stopped by a signal and could not end"});
  const auto begin = std::chrono::steady_clock::now();
  expect_refusal(
      [] {
        run(3,
            [](Communicator& c) {
              if (c.rank() == 1) raise(SIGSTOP);
              if (c.rank() == 2) throw Error("no rows", "give some");
            },
            {.grace = 100});
      },
      {"rank 2: no rows"});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(50));  // it cannot use the grace
}

TEST(Processes, ARankThatLeavesIsNamedByThoseThatWaitForIt) {
  expect_refusal(
      [] {
        run(2, [](Communicator& c) {
          if (c.rank() == 0) wait_for_all(c);
        });
      },
      {"rank 0: rank 1 ended while rank 0 waited for it in call 0"});
}

TEST(Processes, RanksThatHangAreEnded) {
  const auto begin = std::chrono::steady_clock::now();
  expect_refusal(
      [] {
        run(3,
            [](Communicator& c) {
              if (c.rank() == 1) throw Error("the first failure", "none");
              for (;;) pause();
            },
            {.grace = 0.5});
      },
      {"rank 1: the first failure"});
  expect_refusal(
      [] {
        run(2,
            [](Communicator& c) {
              if (c.rank() == 0) wait_for_all(c);
              for (;;) pause();
            },
            {.time_limit = 0.5, .grace = 0.5});
      },
      {"rank 0: rank 0 waited 0.5 seconds in call 0 for rank 1"});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
}

TEST(Processes, SidesThatDoNotAgree) {
  // Rank 0 sends in its second call; rank 1 receives in the call with this number.
  const auto exchange = [](Index sent, Index received, int call) {
    run(2, [&](Communicator& c) {
      std::vector<float> from(at(sent)), to(at(received));
      if (c.rank() == 1 && call == 1) c.exchange({}, {}).wait();
      if (c.rank() == 1) c.exchange({}, {{0, {block(to)}}}).wait();
      if (c.rank() == 0) c.exchange({}, {}).wait();
      if (c.rank() == 0) c.exchange({{1, {block(from)}}}, {}).wait();
    });
  };
  expect_refusal([&] { exchange(10, 9, 1); }, {"rank 1: call 1: rank 0 sends 40 bytes to rank 1", "receives 36"});
  expect_refusal([&] { exchange(10, 10, 0); }, {"rank 1: call 0: rank 0 sends no message to rank 1", "receives 40"});
}

TEST(Processes, RefusesWhatCannotBe) {
  const auto nothing = [](Communicator&) {};
  expect_refusal([&] { run_processes(0, nothing); }, {"0 ranks", "1 to 256"});
  expect_refusal([&] { run_processes(2, nothing, {.time_limit = 0}); }, {"time limit of 0"});
}

}  // namespace
}  // namespace weft::test
