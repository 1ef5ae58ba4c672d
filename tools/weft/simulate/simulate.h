// weft simulate: what it predicts, one line a problem, layout and schedule.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "check/cases/case.h"
#include "weft/choose.h"
#include "weft/simulate.h"

namespace weft::tool {

// Which of the swept values a line has.
struct SimulatedLine {
  Index ranks = 1;
  std::string docs, window, heads;  // as the flags said them
  LayoutKind layout = LayoutKind::zigzag;
  ScheduleOptions schedule = {};
  bool chosen = false;  // by auto
  Index tokens = 0, documents = 0;
  double flops = 0;  // useful ones, of all ranks and passes
  std::optional<Timeline> forward = {}, backward = {};
  std::string refused = {};
  std::string why = {};    // of auto
  std::string asked = {};  // schedule and layout as they were asked for: those of auto are others on other ranks

  // Both passes together.
  struct Totals {
    double exchange = 0, hidden = 0;  // seconds of all ranks with bytes on their way, and of these under computes
    double straggling = 1;            // of the pass where it is larger
    Index bytes_in = 0;               // of the rank that receives most
  };
  Totals totals() const;

  double seconds() const { return (forward ? forward->seconds : 0) + (backward ? backward->seconds : 0); }
  double ideal() const { return (forward ? forward->ideal : 0) + (backward ? backward->ideal : 0); }
  Index memory() const;
  std::string name() const;  // of layout and schedule
};

// One page, without anything from elsewhere; everything that was given is escaped.
std::string simulated_page(const Machine& machine, const std::string& heading, const std::vector<SimulatedLine>& lines);

}  // namespace weft::tool
