// The pool of threads of the CPU kernels.
#include "kernel/cpu/parallel.h"

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace weft::cpu {
namespace {

constexpr Index kWorth = 1 << 20;  // as many threads as there are

// Takes every number below `count` once, as the kernels take their items; returns the sum.
int take_all(int count) {
  std::atomic<int> next = 0, sum = 0;
  on_threads(kWorth, [&] {
    for (int i; (i = next++) < count;) sum += i;
  });
  return sum;
}

TEST(Parallel, every_item_is_taken_by_calls_one_after_another) {
  for (int i = 0; i < 2000; ++i) EXPECT_EQ(take_all(40), 40 * 39 / 2);
}

TEST(Parallel, every_item_is_taken_by_callers_at_the_same_time) {
  std::vector<std::thread> callers;
  for (int c = 0; c < 8; ++c) {
    callers.emplace_back([] {
      for (int i = 0; i < 300; ++i) EXPECT_EQ(take_all(40), 40 * 39 / 2);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(Parallel, a_worker_helps) {
  if (std::thread::hardware_concurrency() < 2) GTEST_SKIP() << "one core";
  std::atomic<int> inside = 0;
  on_threads(kWorth, [&] {
    ++inside;
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (inside < 2 && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
  });
  EXPECT_GE(inside, 2);
}

TEST(Parallel, an_exception_of_any_thread_reaches_the_caller) {
  const std::thread::id caller = std::this_thread::get_id();
  EXPECT_THROW(on_threads(kWorth, [] { throw std::runtime_error("all"); }), std::runtime_error);
  EXPECT_THROW(on_threads(kWorth,
                          [&] {
                            if (std::this_thread::get_id() == caller) throw std::runtime_error("caller");
                          }),
               std::runtime_error);
  if (std::thread::hardware_concurrency() < 2) return;
  std::atomic<bool> thrown = false;
  EXPECT_THROW(on_threads(kWorth,
                          [&] {
                            if (std::this_thread::get_id() == caller) {
                              while (!thrown) std::this_thread::yield();
                            } else {
                              thrown = true;
                              throw std::runtime_error("worker");
                            }
                          }),
               std::runtime_error);
  EXPECT_EQ(take_all(40), 40 * 39 / 2);
}

TEST(Parallel, a_forked_process_has_workers_of_its_own) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer starts no threads after a fork";
#endif
  if (std::thread::hardware_concurrency() < 2) GTEST_SKIP() << "one core";
  ASSERT_EQ(take_all(40), 40 * 39 / 2);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    std::atomic<int> inside = 0;
    on_threads(kWorth, [&] {
      ++inside;
      while (inside < 2) std::this_thread::yield();
    });
    _exit(take_all(40) == 40 * 39 / 2 ? 0 : 1);
  }
  int status = 1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace weft::cpu
