// Times a schedule on a machine, event by event: what the executor would do, without tensors and without ranks.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "weft/cost.h"
#include "weft/layout.h"
#include "weft/mask.h"
#include "weft/schedule.h"

namespace weft {

// Something that takes time on a rank. Exchanges overlap with computes.
struct TimelineEvent {
  enum class Kind {
    compute,   // the kernel attends slices
    exchange,  // bytes on their way into and out of the rank, from the moment all its peers have started
    rows,      // a pass over rows: clear, add, round, end
    wait,      // the rank does nothing but wait for an exchange
  };
  Kind kind = Kind::compute;
  // Static text: "attend", "K, V", "dK, dV", "swap in", "swap out", "dK, dV home", "max_logit", "end" and so on.
  std::string_view name = {};
  Index step = -1;  // of the schedule; -1: before or after the steps
  double begin = 0, end = 0;
  Index pairs = 0;                    // visible, times query heads; of computes
  Index bytes_in = 0, bytes_out = 0;  // of exchanges, between different ranks
};
// The name of a kind of event.
WEFT_API std::string_view name(TimelineEvent::Kind kind);

// Sums over one rank's pass.
struct RankTimes {
  double end = 0;         // of the rank
  double compute = 0;     // kernels
  double rows = 0;        // passes over rows, and copies if ranks make them
  double exchange = 0;    // time with bytes on their way
  double overlapped = 0;  // part of `exchange` during which the rank computes
  double waiting = 0;     // neither computing nor passing over rows, until `end`
  Index pairs = 0;        // times query heads
  Index bytes_in = 0, bytes_out = 0;
};

// What one rank does, event by event.
struct RankTimeline {
  Index rank = 0;
  std::vector<TimelineEvent> events;  // by begin
};

// A simulated pass of all ranks.
struct WEFT_API Timeline {
  Pass pass = Pass::forward;
  double seconds = 0;  // until the last rank ends
  // If pairs were perfectly balanced and ran at the kernel's peak rate, with no calls, partial tiles or exchanges.
  double ideal = 0;
  std::vector<RankTimes> ranks = {};
  std::vector<RankTimeline> detail = {};  // of the ranks that were asked for
  RankMemory memory = {};                 // of the rank that needs most
  Index planned = 0;  // ranks whose slices were counted; where not all, the others are as their neighbours

  double efficiency() const { return seconds > 0 ? ideal / seconds : 1; }
  double overlap() const;     // overlapped over all exchange time; 1 if there is none
  Index slowest() const;      // the rank that computes longest
  double straggling() const;  // imbalance of compute time, max / mean
  Index bytes_in() const;     // of the rank that receives most
};

// What simulate() keeps, and how it reports.
struct SimulateOptions {
  std::vector<Index> detail = {};  // ranks whose events are kept
  bool busiest = false;            // those of the rank with most pairs are kept too
  // Called now and then with what is done, from 0 to 1; false stops, and simulate throws.
  bool (*progress)(double done, void* context) = nullptr;
  void* context = nullptr;
};

// What all ranks compute together.
struct Job {
  Problem problem;
  Layouts layouts;
  Index heads_q = 1, heads_k = 1;
  ScheduleOptions schedule = {};
  TensorShape shape = {};
};

// Times the schedules that make_schedule would give the ranks, without making them one by one, so that thousands of
// ranks take seconds. Error for what make_schedule refuses.
WEFT_API Timeline simulate(const Job& job, const Machine& machine, Pass pass, const SimulateOptions& options = {});

// The same for schedules at hand, one a rank, in the order of ranks.
WEFT_API Timeline simulate(std::span<const Schedule> schedules, const TensorShape& shape, const Machine& machine,
                           Pass pass, const SimulateOptions& options = {});

}  // namespace weft
