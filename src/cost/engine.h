// Runs an outline's calls through time.
#pragma once

#include "cost/outline.h"
#include "index.h"

namespace weft::cost {

// Collects the timeline: sums of every rank, and the events of those that are asked for.
class Record {
 public:
  Record(const Outline& outline, const SimulateOptions& options, Timeline& to);

  void compute(Index rank, const Op& op, double begin, double end, double pairs);
  void rows(Index rank, const Op& op, double begin, double end);
  void wait(Index rank, const Op& op, double begin, double end);
  void exchange(Index rank, const Op& op, const Load& load, double begin, double end);
  void end(Index rank, double time);

  struct Interval {
    double begin = 0, end = 0, interference = 0;
  };
  // Adds an exchange that may overlap with computes from `now` on.
  void start(Index rank, double now, const Interval& interval) {
    std::vector<Interval>& all = under_way_[at(rank)];
    std::erase_if(all, [&](const Interval& i) { return i.end <= now; });
    all.push_back(interval);
  }
  const std::vector<Interval>& under_way(Index rank) const { return under_way_[at(rank)]; }
  // How long `work` takes from `begin` on, slowed by these exchanges.
  double slowed(Index rank, double begin, double work) const;

 private:
  void keep(Index rank, const TimelineEvent& event);

  Timeline& to_;
  std::vector<std::int32_t> detail_;  // by rank: place in to_.detail, or -1
  std::vector<std::vector<Interval>> under_way_;
};

// For ranks with a processor each: all ranks call by call.
void run_in_step(const Outline& outline, const Machine& machine, Pass pass, const SimulateOptions& options,
                 Record& record);
// For ranks that share processors: event by event.
void run_shared(const Outline& outline, const Machine& machine, Pass pass, const SimulateOptions& options,
                Record& record);

// Bytes that the rank's processor copies in wait(), in seconds.
inline double copy_seconds(const Machine& machine, const Load& load) {
  if (machine.copy_bandwidth == 0) return 0;
  Index messages = 0;
  for (const Index n : load.messages) messages += n;
  return load.copied / machine.copy_bandwidth + static_cast<double>(messages) * machine.copy_seconds;
}

}  // namespace weft::cost
