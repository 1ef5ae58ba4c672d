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

// Processes are as many as they are: problems of other numbers of ranks are passed over, on all of them alike.
bool fits(const RandomSet& set, const check::Case& c) {
  return set.method.world == nullptr || c.ranks == set.method.world->ranks();
}

Checked check_one(const RandomSet& set, check::Case drawn) {
  Checked checked{std::move(drawn), {}, false};
  try {
    checked.outcome = check_case(checked.given, fitting(set.method, checked.given));
  } catch (const PeerError&) {
    throw;                                 // the other processes are gone, and with them all that is left to do
  } catch (const std::exception& error) {  // random cases are valid: whatever is thrown is a fault
    checked.outcome.failure = fmt::format("refused: {}", error.what());
  }
  return checked;
}

// One problem, and which one it is.
struct Drawn {
  Index number = 0;
  std::optional<check::Case> given = {};  // none yet: by the thread that checks it
};

// The next `count` problems from number `next` on, which is moved past them.
std::vector<Drawn> next_batch(const RandomSet& set, Index count, Index& next) {
  std::vector<Drawn> batch;
  for (; static_cast<Index>(batch.size()) < count; ++next) {
    if (set.method.world == nullptr) {
      batch.push_back({next});
      continue;
    }
    check::Case c = draw(set, set.seed + static_cast<unsigned long long>(next));
    if (fits(set, c)) batch.push_back({next, std::move(c)});
  }
  return batch;
}

// In order.
std::vector<Checked> check_batch(const RandomSet& set, std::vector<Drawn> batch) {
  std::vector<Checked> done(batch.size());
  std::atomic<std::size_t> next = 0;
  on_threads(set.threads, [&] {
    for (std::size_t i; (i = next++) < batch.size() && !set.limit.over();)
      done[i] = check_one(set, batch[i].given ? *std::move(batch[i].given)
                                              : draw(set, set.seed + static_cast<unsigned long long>(batch[i].number)));
  });
  return done;
}

}  // namespace

Tally check_random(const RandomSet& set) {
  Tally tally(set.method);
  Progress progress(set.count, "cases");
  Index failed = 0, left_out = 0, number = 0;
  std::optional<Index> first_left_out;
  const Index size = set.large.one_in == 1 ? kLargeOutcomes : kOutcomes;
  for (Index first = 0; first < set.count; first += size) {
    const Index last = std::min(first + size, set.count);
    const std::vector<Drawn> batch = next_batch(set, last - first, number);
    const std::vector<Checked> all = check_batch(set, batch);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Checked& checked = all[i];
      if (checked.left_out) {
        ++left_out;
        if (!first_left_out) first_left_out = batch[i].number;
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
  tally.set_seeds(set.seed, set.seed + static_cast<unsigned long long>(first_left_out.value_or(number)));
  return tally;
}

}  // namespace weft::tool
