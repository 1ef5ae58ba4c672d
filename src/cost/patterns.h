// Patterns of the exchanges that schedules make.
#pragma once

#include <vector>

#include "cost/outline.h"

namespace weft::cost {

// Makes patterns for a machine and so many ranks.
class Patterns {
 public:
  Patterns(const Machine& machine, Index ranks) : machine_(machine), topology_(machine), ranks_(ranks) {}

  struct Sent {
    Index from = 0, to = 0;
    double bytes = 0;
  };
  // Any messages; those of a rank to itself are only copied. `adds`: what comes is added, which is two more trips to
  // memory than a copy's two. `uneven`: ranks send other amounts than they get.
  Pattern listed(std::vector<Sent> messages, bool adds, bool uneven) const;
  // Messages of neighbours that are alike, `each` bytes a row; ranks send other amounts than they get. `back`: in the
  // opposite direction, and what comes is added.
  Pattern spans(std::shared_ptr<const std::vector<Span>> rows, Index repeat, double each, bool back) const;
  // All-gather among the ranks at the same place in blocks of `group`; `back`: the reduce-scatter of the same bytes.
  Pattern gather(Index group, const std::vector<double>& bytes, bool back) const;
  // In every block of `group` ranks, member i gets bytes[i] from each of the others; `back`: in the opposite direction.
  Pattern swap(Index group, const std::vector<double>& bytes, bool back, bool adds) const;
  // An all-gather of a few bytes, for max_logit and the sink's gradient.
  Pattern numbers(double bytes) const;

 private:
  void finish(Pattern& pattern) const;
  double copies(double bytes, bool adds) const { return adds ? 2 * bytes : bytes; }

  const Machine& machine_;
  Topology topology_;
  Index ranks_;
};

}  // namespace weft::cost
