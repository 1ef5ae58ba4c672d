// A job in a few of its ranks: enough to compare schedules, in microseconds.
#pragma once

#include "cost/costs.h"
#include "schedule/build.h"
#include "weft/choose.h"

namespace weft::cost {

// What the queries of some ranks see, by the rank that holds the keys; made once for all schedules.
class Sketch {
 public:
  Sketch(const Layer& layer, const Layouts& layouts, const Machine& machine);

  // Predicted seconds and bytes of a pass by a schedule; Error for what make_schedule refuses.
  struct Result {
    double seconds = 0;
    Index memory = 0;
  };
  Result estimate(const ScheduleOptions& options, Pass pass) const;
  // A lower bound of the seconds: what the exchanges take alone.
  double at_least(const ScheduleOptions& options, Pass pass) const;
  // Of all ranks, extrapolated from the samples.
  double slices() const { return slices_; }
  // Steps of all ranks whose exchanges a simulation goes through peer by peer.
  double listed_steps(const ScheduleOptions& options) const;

 private:
  friend class Estimate;
  struct Cell {
    Index source = 0;
    TileWork work[2];   // of one K/V head and its query heads, forward and backward
    Index touched = 0;  // rows of the source
  };
  struct Sent {
    Index to = 0, rows = 0;
  };
  struct Sample {
    Index rank = 0;
    std::vector<Cell> cells;
    TileWork in_sequence[2];
    std::vector<Sent> sent;  // own rows that others touch
  };

  void add_seen(Sample& sample, const RunList& keys);
  void add_sent(Sample& sample, const RunList& queries);

  const Layer& layer_;
  const Layouts& layouts_;
  const Machine& machine_;
  Index ranks_;
  schedule::Shape shape_;
  Schedule base_;                // checked: heads, layouts
  std::vector<Sample> samples_;  // by rank
  std::vector<double> pairs_;    // [ranks] of the ranks' queries; empty: the same for all
  double slices_ = 0;
};

}  // namespace weft::cost
