#include "random_set.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <thread>

#include <fmt/format.h>
#include <unistd.h>

#include "check/random_case.h"
#include "numbers.h"
#include "schedule_flags.h"

namespace weft::tool {
namespace {

constexpr Index kBatch = 512;  // outcomes kept at a time; also how often progress is shown
constexpr Index kShown = 10;

struct Checked {
  check::Case given;
  Outcome outcome;
};

// Drawn cases have few heads and any number of ranks, which not every option goes with.
Method fitting(Method method, const check::Case& c) {
  for (ScheduleOptions& options : method.schedules) options = fitted(options, c);
  return method;
}

Checked check_one(const RandomSet& set, Index i) {
  check::RandomChoices choices(set.seed + static_cast<unsigned long long>(i));
  Checked checked{random_case(choices, set.layout), {}};
  try {
    checked.outcome = check_case(checked.given, fitting(set.method, checked.given));
  } catch (const std::exception& error) {  // random cases are valid: whatever is thrown is a fault
    checked.outcome.failure = fmt::format("refused: {}", error.what());
  }
  return checked;
}

// Cases [first, last) in order, whichever thread took which.
std::vector<Checked> check_batch(const RandomSet& set, Index first, Index last) {
  std::vector<Checked> batch(static_cast<std::size_t>(last - first));
  std::atomic<Index> next = first;
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(set.threads));
  const auto work = [&](std::size_t thread) {
    try {
      for (Index i; (i = next++) < last;) batch[static_cast<std::size_t>(i - first)] = check_one(set, i);
    } catch (...) {
      errors[thread] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t t = 1; t < errors.size(); ++t) threads.emplace_back(work, t);
  work(0);
  for (std::thread& t : threads) t.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return batch;
}

void show_progress(Index done, const RandomSet& set, const Tally& tally) {
  static const bool terminal = isatty(fileno(stderr)) == 1;
  if (!terminal) return;
  fmt::print(stderr, "\r{} of {} cases, {} failed{}", grouped(done), grouped(set.count), grouped(tally.failed()),
             done == set.count ? "\r\x1b[K" : "");
  std::fflush(stderr);
}

}  // namespace

Tally check_random(const RandomSet& set) {
  Tally tally(set.method);
  Index failed = 0;
  for (Index first = 0; first < set.count; first += kBatch) {
    const Index last = std::min(first + kBatch, set.count);
    for (const Checked& checked : check_batch(set, first, last)) {
      tally.add(checked.given, checked.outcome);
      if (!checked.outcome.failure || ++failed > kShown + 1) continue;
      if (failed <= kShown)
        fmt::print("FAILED {}\n  {}\n", *checked.outcome.failure,
                   command_of(checked.given, set.method, checked.outcome.failed_way));
      else
        fmt::print("(further failures are counted, not shown)\n");
    }
    show_progress(last, set, tally);
  }
  return tally;
}

}  // namespace weft::tool
