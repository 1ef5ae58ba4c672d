// Simulated schedules on a machine, and the page of `weft simulate`.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "weft/simulate.h"

namespace weft::draw {

// One problem on some ranks under one layout and schedule.
struct Simulation {
  Index ranks = 1;
  std::string docs, window, heads;  // as the flags give them
  LayoutKind layout = LayoutKind::zigzag;
  ScheduleOptions schedule = {};
  bool chosen = false;     // by auto
  std::string asked = {};  // schedule and layout as asked for: what auto chooses differs from rank count to rank count
  std::string why = {};    // why auto chose it
  Index tokens = 0, documents = 0, heads_q = 1;
  double flops = 0;                                     // useful ones, of all ranks and passes
  std::optional<Timeline> forward = {}, backward = {};  // with events of rank 0 and of the rank with most pairs
  std::string refused = {};                             // the reason, if it cannot be run
  Index layers = 1;                                     // of the model that attend so; times are of one of them
  std::string layer = {};                               // "chunk 8192"; empty without a model
  Index source = 0;  // numbers a row of the latent that moves in place of K and V; 0: these move

  // Both passes together.
  struct Totals {
    double exchange = 0, overlapped = 0;  // seconds of exchange over all ranks, and how much of it is under computes
    double imbalance = 1;                 // longest compute over the mean, of the pass where it is larger
    Index bytes_in = 0;                   // of the rank that receives most
    // Parts of seconds(). Busy: computing or passing over rows.
    double busy = 0;     // mean over the ranks
    double uneven = 0;   // longest less the mean
    double exposed = 0;  // the rest: exchanges and waiting that the busiest rank's work does not overlap
  };
  Totals totals() const;
  double seconds() const { return (forward ? forward->seconds : 0) + (backward ? backward->seconds : 0); }
  double ideal() const { return (forward ? forward->ideal : 0) + (backward ? backward->ideal : 0); }
  double efficiency() const { return ideal() / seconds(); }
  double tokens_per_second() const {  // of a rank, through this attention
    return static_cast<double>(tokens) / seconds() / static_cast<double>(ranks);
  }
  Index memory() const;       // bytes of the rank that needs most, in the pass that needs most
  std::string name() const;   // "auto: ring, zigzag"
  std::string words() const;  // of the schedule: "ring", "ring, latent"
};

// A page in one file. Text of any origin is text in it, never HTML.
std::string html(const Machine& machine, const std::string& heading, const std::string& command,
                 const std::vector<Simulation>& all);

}  // namespace weft::draw
