// Exchanges that schedules are made of.
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
  // Messages of neighbours that are alike, `each` bytes a row; ranks send other amounts than they get. `back`: the
  // other way, and what comes is added.
  Pattern spans(std::shared_ptr<const std::vector<Span>> rows, Index repeat, double each, bool back) const;
  // Every rank sends its bytes to all ranks of the same place in blocks of `inside`, and gets theirs. `back`: it gets a
  // sum of as many messages as it sends, instead.
  Pattern gather(Index inside, const std::vector<double>& bytes, bool back) const;
  // Each rank of a block of `inside` sends to[i] bytes to its member i, and gets from it mine[its own place]; `back`:
  // the other way.
  Pattern swap(Index inside, const std::vector<double>& bytes, bool back, bool adds) const;
  // Everyone sends the same few bytes to everyone.
  Pattern numbers(double bytes) const;

 private:
  void finish(Pattern& pattern) const;
  double copies(double bytes, bool adds) const { return adds ? 2 * bytes : bytes; }

  const Machine& machine_;
  Topology topology_;
  Index ranks_;
};

}  // namespace weft::cost
