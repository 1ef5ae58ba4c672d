// Communicators that cannot go on: sides that do not agree, ranks that fail, and links that are slow.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

#include <gtest/gtest.h>
#include <sys/resource.h>

#include "comm/letters.h"
#include "refusal.h"
#include "sanitized.h"
#include "weft/communicator.h"

namespace weft {
namespace {

using namespace test;
using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }
void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

void run(Index ranks, const std::function<void(Communicator&)>& body, const ThreadRanks& how = {.time_limit = 60}) {
  run_ranks(ranks, body, how);
}

// ---- sides that do not agree

// What each rank's wait() throws, if it does.
std::vector<std::string> errors(Index ranks, const std::function<Request(Communicator&)>& call) {
  std::vector<std::string> result(at(ranks));
  run(ranks, [&](Communicator& c) {
    Request request = call(c);
    result[at(c.rank())] = error_of([&] { request.wait(); });
  });
  return result;
}

TEST(Disagreement, Sizes) {
  std::vector<float> memory(64);
  const auto result = errors(3, [&](Communicator& c) {
    std::vector<Message> sends, receives;
    if (c.rank() == 0) sends.push_back({2, {{memory.data(), 1, 1, 16}}});
    if (c.rank() == 2) receives.push_back({0, {{memory.data() + 32, 1, 1, 12}}});
    return c.exchange(std::move(sends), std::move(receives));
  });
  expect_parts(result[2], {"call 0", "rank 0 sends 16 bytes to rank 2", "receives 12"});
  expect_parts(result[0], {"rank 2", "gave up"});
  EXPECT_EQ(result[1], "");
}

TEST(Disagreement, MissingMessage) {
  std::vector<float> memory(64);
  const auto result = errors(2, [&](Communicator& c) {
    std::vector<Message> sends, receives;
    if (c.rank() == 0) sends.push_back({1, {{memory.data(), 1, 1, 16}}});
    if (c.rank() == 1) receives.assign(2, {0, {{memory.data() + 32, 1, 1, 16}}});
    return c.exchange(std::move(sends), std::move(receives));
  });
  expect_parts(result[1], {"call 0", "rank 1 receives more messages from rank 0 than the 1", "16 bytes"});
  EXPECT_EQ(result[0], "");
}

TEST(Disagreement, UnwantedMessages) {
  std::vector<float> memory(64);
  const auto result = errors(3, [&](Communicator& c) {  // 0 and 1 to each other, 2 to itself
    return c.exchange({{c.rank() == 2 ? 2 : 1 - c.rank(), {{memory.data(), 1, 1, 16}}}}, {});
  });
  expect_parts(result[0], {"rank 0 sends 16 bytes to rank 1", "does not receive"});
  expect_parts(result[1], {"rank 1 sends 16 bytes to rank 0", "does not receive"});
  expect_parts(result[2], {"rank 2 sends 16 bytes to rank 2", "does not receive"});
}

TEST(Disagreement, UnwantedAfterOthers) {
  std::vector<float> memory(64);
  const auto result = errors(2, [&](Communicator& c) {
    if (c.rank() == 0) return c.exchange(std::vector<Message>(2, {1, {{memory.data(), 1, 1, 16}}}), {});
    return c.exchange({}, {{0, {{memory.data() + 32, 1, 1, 16}}}});
  });
  expect_parts(result[0], {"rank 0 sends 16 bytes to rank 1", "does not receive"});
  EXPECT_EQ(result[1], "");
}

// The sender waits already, and learns it as soon as the receiver has all that it wants, not when the time is up.
TEST(Disagreement, UnwantedIsToldAtOnce) {
  std::vector<float> memory(64);
  std::atomic<bool> told = false;
  run(2, [&](Communicator& c) {
    if (c.rank() == 0) {
      Request request = c.exchange(std::vector<Message>(2, {1, {{memory.data(), 1, 1, 16}}}), {});
      EXPECT_THROW(request.wait(), Error);
      told = true;
      return;
    }
    Request request = c.exchange({}, {{0, {{memory.data() + 32, 1, 1, 16}}}});
    sleep(0.05);  // rank 0 has seen that it came, and waits
    request.wait();
    for (int i = 0; i < 1000 && !told; ++i) sleep(0.01);
    EXPECT_TRUE(told);
  });
}

TEST(Disagreement, AddOfWhatIsNotF32) {
  std::vector<float> memory(64);
  const auto result = errors(2, [&](Communicator& c) {
    if (c.rank() == 0) return c.exchange({{1, {{memory.data(), 2, 1, 6, 8, 0}}}}, {});
    return c.exchange({}, {{0, {{memory.data() + 32, 1, 1, 12}}, Combine::add}});
  });
  expect_parts(result[1], {"rank 1 adds what rank 0 sends", "f32"});
}

TEST(Disagreement, NamedThroughRunRanks) {
  std::vector<float> memory(64);
  expect_refusal(
      [&] {
        run(4, [&](Communicator& c) {
          const std::unique_ptr<Communicator> pair = c.split(c.rank() / 2, 0);
          std::vector<Block> all(2, {memory.data(), 1, 1, 8});
          if (c.rank() == 3) all[0].bytes = 4;
          std::vector<float> mine(2);
          std::vector<float> from(4);
          all[0].data = from.data(), all[1].data = from.data() + 2;
          pair->all_gather(block(mine), all).wait();
        });
      },
      {"rank 3: call 0", "rank 0 of a split (2 of all) sends 8 bytes", "receives 4"});
}

// ---- ranks that fail

struct Quick {  // nothing may wait for a time limit
  Clock::time_point start = Clock::now();
  ~Quick() { EXPECT_LT(seconds_since(start), 10); }
};

TEST(Failure, OfOneEndsAll) {
  for (int repeat = 0; repeat < 50; ++repeat) {
    const Quick quick;
    std::atomic<int> told = 0;
    const auto body = [&](Communicator& c) {
      std::vector<float> memory(1000);
      std::vector<std::vector<float>> all(5, std::vector<float>(1000));
      for (int step = 0;; ++step) {
        Request request = c.all_gather(block(memory), blocks(all));
        if (c.rank() == 2 && step == repeat % 5) throw Error("boom", "be calm");
        try {
          request.wait();
        } catch (const Error& e) {
          if (std::string(e.what()).find("rank 2 failed: boom; be calm") != std::string::npos) ++told;
          throw;
        }
      }
    };
    expect_refusal([&] { run(5, body); }, {"rank 2: boom", "be calm"});
    EXPECT_EQ(told, 4);
  }
}

TEST(Failure, BeforeAnyCall) {
  const Quick quick;
  expect_refusal(
      [] {
        run(3, [](Communicator& c) {
          if (c.rank() == 1) throw Error("early", "later");
          (void)c.split(0, 0);
        });
      },
      {"rank 1: early"});
}

TEST(Failure, OtherExceptionsStayWhatTheyAre) {
  const auto fail = [](auto exception) {
    run(3, [&](Communicator& c) {
      float one = 1;
      if (c.rank() == 1) throw exception;
      c.all_reduce(&one, DType::f32, 1, Reduce::sum).wait();
    });
  };
  EXPECT_THROW(fail(std::out_of_range("far")), std::out_of_range);
  EXPECT_THROW(fail(42), int);
  try {
    fail(std::length_error("long"));
  } catch (const std::length_error& e) {
    EXPECT_STREQ(e.what(), "long");
  }
}

TEST(Failure, LeavingEarly) {
  for (int repeat = 0; repeat < 50; ++repeat) {
    const Quick quick;
    std::atomic<int> told = 0;
    const auto body = [&](Communicator& c) {
      if (c.rank() == 1 && repeat % 2 == 0) return;
      float one = 1;
      try {
        c.all_reduce(&one, DType::f32, 1, Reduce::sum).wait();
        if (c.rank() == 1) return;
        c.all_reduce(&one, DType::f32, 1, Reduce::sum).wait();
      } catch (const Error& e) {  // who is told last may learn it from one who was told before
        if (std::string(e.what()).find("rank 1 has left") != std::string::npos) ++told;
        throw;
      }
    };
    expect_refusal([&] { run(4, body); }, {"rank 1 has left"});
    EXPECT_EQ(told, 3);
  }
}

// Rank 1 comes only after the others have given it up.
void miss_time_limit(double time_limit, std::initializer_list<std::string> parts) {
  const Quick quick;
  std::atomic<int> gave_up = 0;
  const auto body = [&](Communicator& c) {
    float one = 1;
    while (c.rank() == 1 && gave_up < 3) sleep(0.001);
    try {
      c.all_reduce(&one, DType::f32, 1, Reduce::sum).wait();
    } catch (const Error&) {
      ++gave_up;
      throw;
    }
  };
  expect_refusal([&] { run(4, body, {.time_limit = time_limit}); }, parts);
}

TEST(Failure, TimeLimit) {
  for (int repeat = 0; repeat < 50; ++repeat) miss_time_limit(0.01, {"waited 0.01 seconds in call 0 for rank "});
  miss_time_limit(1, {"waited 1 seconds in call 0 for rank 1: #0 exchange, 12 bytes to ",
                      " (last calls: #0 "});  // all others come within a second
}

TEST(Failure, InOneGroupEndsTheOthers) {
  const Quick quick;
  expect_refusal(
      [] {
        run(4, [](Communicator& c) {
          const std::unique_ptr<Communicator> pair = c.split(c.rank() / 2, 0);
          float one = 1;
          if (c.rank() == 3) throw Error("boom", "be calm");
          for (int i = 0; c.rank() == 2 || i < 100; ++i) pair->all_reduce(&one, DType::f32, 1, Reduce::sum).wait();
          c.all_reduce(&one, DType::f32, 1, Reduce::sum).wait();
        });
      },
      {"rank 3: boom"});
}

// The buffers of a rank that fails go as soon as it has unwound, and others may be copying from them just then.
TEST(Failure, WhileOthersCopyFromIt) {
  for (int repeat = 0; repeat < 50; ++repeat) {
    const Quick quick;
    std::atomic<int> others_came = 0;
    const auto body = [&](Communicator& c) {
      const Index rows = 50000;  // with gaps, so that copies take long and a sanitizer looks at every row
      std::vector<float> memory(at(5 * rows), 1.0f), into(at(4 * rows));
      // Gone after the request: what a receiver took must be from before.
      struct Overwrites {
        std::vector<float>& values;
        ~Overwrites() { std::fill(values.begin(), values.end(), 2.0f); }
      } overwrites{memory};
      std::vector<Message> sends, receives;
      for (Index peer = 1; peer < 4 && c.rank() == 0; ++peer) {
        sends.push_back({peer, {{memory.data(), rows, 1, 16, 20, 0}}});
      }
      if (c.rank() != 0) receives.push_back({0, {block(into)}});
      Request request = c.exchange(std::move(sends), std::move(receives));
      if (c.rank() == 0) {
        while (others_came < 1 + repeat % 3) std::this_thread::yield();
        sleep(repeat * 5e-6);
        throw std::runtime_error("gone");
      }
      ++others_came;
      request.wait();
      EXPECT_EQ(std::count(into.begin(), into.end(), 1.0f), 4 * rows);
    };
    EXPECT_THROW(run(4, body), std::runtime_error);
  }
}

TEST(Failure, CaughtByItsRank) {
  const Quick quick;
  run(2, [](Communicator& c) {
    float one = 1;
    try {
      Request request = c.all_reduce(&one, DType::f32, 1, Reduce::sum);
      if (c.rank() == 0) throw std::runtime_error("caught");
      request.wait();
    } catch (const Error& e) {
      EXPECT_EQ(c.rank(), 1);
      EXPECT_NE(std::string(e.what()).find("rank 0 gave up call 0"), std::string::npos) << e.what();
    } catch (const std::runtime_error&) {
      EXPECT_EQ(c.rank(), 0);
    }
    one = 1;
    c.all_reduce(&one, DType::f32, 1, Reduce::sum).wait();  // both go on
    EXPECT_EQ(one, 2);
  });
}

TEST(Failure, RequestThatOutlivesItsRank) {
  std::vector<float> memory(2, 1);
  std::vector<Request> kept(2);
  run(2,
      [&](Communicator& c) { kept[at(c.rank())] = c.all_reduce(&memory[at(c.rank())], DType::f32, 1, Reduce::sum); });
  expect_refusal([&] { kept[0].wait(); }, {"rank 1 has left"});
}

TEST(FailureDeathTest, ThreadsThatCannotBeStarted) {
  if (kSanitized) GTEST_SKIP() << "sanitizers reserve more memory than any limit";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto starve = [] {
    Index pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlimit limit{static_cast<rlim_t>(pages * 4096 + (Index{96} << 20)), RLIM_INFINITY};
    if (setrlimit(RLIMIT_AS, &limit) != 0) std::_Exit(3);
    bool ran = false;
    try {
      run_ranks(500, [&](Communicator&) { ran = true; });
    } catch (const Error& e) {
      std::_Exit(!ran && std::string(e.what()).find("of 500 could not be started") != std::string::npos ? 0 : 1);
    }
    std::_Exit(2);
  };
  EXPECT_EXIT(starve(), testing::ExitedWithCode(0), "");
}

// ---- the slowed link

double time_of(Communicator& c, Index calls, Index bytes, double work) {
  std::vector<std::vector<char>> sent(at(calls), std::vector<char>(at(bytes))), received = sent;
  float one = 1;
  c.all_reduce(&one, DType::f32, 1, Reduce::sum).wait();  // start together
  const Clock::time_point start = Clock::now();
  std::vector<Request> requests;
  for (Index i = 0; i < calls; ++i) {
    requests.push_back(c.send_receive((c.rank() + 1) % c.ranks(), block(sent[at(i)]),
                                      (c.rank() + c.ranks() - 1) % c.ranks(), block(received[at(i)])));
  }
  if (work > 0) sleep(work);
  for (Request& request : requests) request.wait();
  return seconds_since(start);
}

TEST(SlowLink, TakesBytesPerBandwidth) {
  const ThreadRanks how{.time_limit = 60, .bandwidth = 1e6};
  run(3, [](Communicator& c) { EXPECT_GE(time_of(c, 1, 100000, 0), 0.1); }, how);
  run(3, [](Communicator& c) { EXPECT_GE(time_of(c, 2, 100000, 0), 0.2); }, how);  // one link
}

// Nothing can come before it was sent, however long its receiver has been there.
TEST(SlowLink, BeginsWithTheLast) {
  std::atomic<double> sent = 0;
  const Clock::time_point start = Clock::now();
  run(2,
      [&](Communicator& c) {
        float x = 1;
        const Block one{.data = &x, .rows = 1, .bytes = 4};
        if (c.rank() == 0) {
          sleep(0.1);
          sent = seconds_since(start);
          c.exchange({{1, {one}}}, {}).wait();
        } else {
          c.exchange({}, {{0, {one}}}).wait();
          EXPECT_GE(seconds_since(start), sent + 0.09);
        }
      },
      {.time_limit = 60, .latency = 0.09});
}

TEST(SlowLink, LatencyIsPerCall) {
  run(2, [](Communicator& c) { EXPECT_GE(time_of(c, 3, 1, 0), 0.15); }, {.time_limit = 60, .latency = 0.05});
}

TEST(SlowLink, RunsUnderWork) {
  run(2, [](Communicator& c) { EXPECT_LT(time_of(c, 1, 600000, 0.6), 1.1); }, {.time_limit = 60, .bandwidth = 1e6});
}

TEST(SlowLink, IsSharedBySplits) {
  const auto body = [](Communicator& c) {
    const std::unique_ptr<Communicator> other = c.split(0, 0);
    std::vector<char> a(100000), b(100000), x(100000), y(100000);
    const Clock::time_point start = Clock::now();
    Request first = c.send_receive(1 - c.rank(), block(a), 1 - c.rank(), block(x));
    Request second = other->send_receive(1 - c.rank(), block(b), 1 - c.rank(), block(y));
    second.wait();
    first.wait();
    EXPECT_GE(seconds_since(start), 0.2);
  };
  run(2, body, {.time_limit = 60, .bandwidth = 1e6});
}

TEST(SlowLink, SelfIsFree) {
  const auto body = [](Communicator& c) {
    std::vector<char> a(100000), x(100000);
    c.send_receive(c.rank(), block(a), c.rank(), block(x)).wait();
  };
  const Quick quick;
  run(2, body, {.time_limit = 60, .bandwidth = 100, .latency = 100});
}

TEST(SlowLink, FailureEndsIt) {
  const Quick quick;
  const auto body = [](Communicator& c) {
    std::vector<char> a(100000);
    if (c.rank() == 0) c.exchange({}, {{1, {block(a)}}}).wait();  // most of a minute on this link
    if (c.rank() == 1) {
      c.exchange({{0, {block(a)}}}, {}).wait();
      sleep(0.05);
      throw Error("boom", "be calm");
    }
  };
  expect_refusal([&] { run(2, body, {.time_limit = 60, .bandwidth = 2000}); }, {"rank 1: boom"});
}

TEST(SlowLink, SlowerThanTheTimeLimit) {
  const Quick quick;
  const auto body = [](Communicator& c) {
    std::vector<char> a(100000), x(100000);
    c.send_receive(1 - c.rank(), block(a), 1 - c.rank(), block(x)).wait();
  };
  expect_refusal([&] { run(2, body, {.time_limit = 60, .bandwidth = 1}); },
                 {"receives 100000 bytes over a link of 1 bytes per second", "time limit of 60 seconds"});
  expect_refusal([&] { run(2, body, {.time_limit = 60, .latency = 1e6}); }, {"1e+06 seconds a call"});
}

// Ranks that wait end when they are told to, whatever they wait for.
TEST(Stop, EndsRanksThatWait) {
  const Quick quick;
  std::stop_source stop;
  std::atomic<int> waiting = 0;
  std::jthread asks([&] {
    while (waiting < 3) sleep(0.01);
    sleep(0.05);
    stop.request_stop();
  });
  const auto body = [&](Communicator& c) {
    ++waiting;
    double x = 0;
    if (c.rank() > 0) c.all_reduce(&x, DType::f64, 1, Reduce::sum).wait();
    while (!stop.stop_requested()) sleep(0.01);  // rank 0 computes, and sees it by itself
  };
  ThreadRanks how{.time_limit = 60};
  how.stop = stop.get_token();
  expect_refusal([&] { run(3, body, how); }, {"the ranks were told to stop"});
}

}  // namespace
}  // namespace weft
