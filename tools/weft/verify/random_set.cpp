#include "verify/random_set.h"

#include <algorithm>
#include <atomic>

#include <fmt/format.h>

#include "check/by_micro.h"
#include "check/cases/tree_case.h"
#include "flags/schedule_flags.h"
#include "index.h"
#include "verify/on_threads.h"

namespace weft::tool {
namespace {

constexpr Index kOutcomes = 512, kLargeOutcomes = 8;  // outcomes kept at a time; also how often progress is shown
constexpr Index kFailuresShown = 10;

struct Checked {
  check::Case given;
  Outcome outcome;
  bool left_out = true;
};

// Fits the options to a drawn case, which may have too few heads or ranks for them.
Method fitting(Method method, const check::Case& c) {
  for (ScheduleOptions& options : method.schedules) options = fitted(options, c);
  return method;
}

check::Case draw(const RandomSet& set, unsigned long long seed) {
  check::RandomChoices choices(seed),
      size(seed + 0x9e3779b97f4a7c15);  // two streams: small cases do not depend on --large
  const bool large = set.large.one_in > 0 && size.one_in(set.large.one_in);
  check::Case drawn = set.trees ? random_tree_case(choices, set.layout)
                      : large   ? random_large_case(choices, set.large.sizes, set.layout)
                                : random_case(choices, set.layout);
  return set.method.micros > 0 ? in_micro_sequences(std::move(drawn)) : drawn;
}

Checked check_one(const RandomSet& set, Index i) {
  Checked checked{draw(set, set.seed + static_cast<unsigned long long>(i)), {}, false};
  try {
    checked.outcome = check_case(checked.given, fitting(set.method, checked.given));
  } catch (const std::exception& error) {  // random cases are valid: whatever is thrown is a fault
    checked.outcome.failure = fmt::format("refused: {}", error.what());
  }
  return checked;
}

// Cases [first, last), in order.
std::vector<Checked> check_batch(const RandomSet& set, Index first, Index last) {
  std::vector<Checked> batch(at(last - first));
  std::atomic<Index> next = first;
  on_threads(set.threads, [&] {
    for (Index i; (i = next++) < last && !set.limit.over();) batch[at(i - first)] = check_one(set, i);
  });
  return batch;
}

}  // namespace

Tally check_random(const RandomSet& set) {
  Tally tally(set.method);
  Progress progress(set.count, "cases");
  Index failed = 0, left_out = 0;
  const Index size = set.large.one_in == 1 ? kLargeOutcomes : kOutcomes;
  for (Index first = 0; first < set.count; first += size) {
    const Index last = std::min(first + size, set.count);
    for (const Checked& checked : check_batch(set, first, last)) {
      if (checked.left_out) {
        ++left_out;
        continue;
      }
      tally.add(checked.given, checked.outcome);
      if (!checked.outcome.failure || ++failed > kFailuresShown + 1) continue;
      if (failed <= kFailuresShown)
        fmt::print("FAILED {}\n  {}\n", *checked.outcome.failure,
                   command_of(checked.given, set.method, checked.outcome.failed_way));
      else
        fmt::print("(further failures are counted, not shown)\n");
    }
    progress.show(last, tally.failed());
    if (set.limit.over()) {
      left_out += set.count - last;
      break;
    }
  }
  if (left_out > 0) tally.leave_out(left_out, fmt::format("--time-limit {}", set.limit.seconds()));
  return tally;
}

}  // namespace weft::tool
