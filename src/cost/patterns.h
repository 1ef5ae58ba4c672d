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

  // What `me` moves in an exchange with the ranks begin + i·stride, i below count, of which it is one. in(range) and
  // out(range): bytes from and to those with i in the range. On machines that relay gathers, rows enter each group of
  // ranks once: every member brings its part and passes it on.
  template <class In, class Out>
  Load collective(Index me, Index begin, Index stride, Index count, const In& in, const Out& out, bool relays) const {
    Load load;
    Range inner{(me - begin) / stride, (me - begin) / stride + 1};  // those that the levels so far join
    for (std::size_t l = 0; l < topology_.levels(); ++l) {
      const Index size = l + 1 < topology_.levels() ? machine_.levels[l].ranks : ranks_, first = me / size * size;
      const Range outer{max_of(0, ceil_div(first - begin, stride)),
                        min_of(count, ceil_div(min_of(ranks_, first + size) - begin, stride))};
      const double received = in(outer)-in(inner), sent = out(outer) - out(inner);
      const double part = relays && l > 0 ? 1 / static_cast<double>(inner.size()) : 1;
      load.bytes_in += static_cast<Index>(received);
      load.bytes_out += static_cast<Index>(sent);
      load.messages[l] = outer.size() - inner.size();
      load.in[l] += received * part;
      load.out[l] += sent * part;
      if (part < 1) {
        load.in[l - 1] += received * (1 - part);
        load.out[l - 1] += sent * (1 - part);
      }
      inner = outer;
    }
    return load;
  }
  Load gather_load(Index me, Index group, double bytes, bool back) const {  // of as many bytes from every rank
    const auto all = [&](Range r) { return bytes * static_cast<double>(r.size()); };
    Load load = collective(me, me % group, group, ranks_ / group, all, all, machine_.relays_gathers);
    load.copied = copies(static_cast<double>(load.bytes_in) + bytes, back);
    return load;
  }

 private:
  void finish(Pattern& pattern) const;
  double copies(double bytes, bool adds) const { return adds ? 2 * bytes : bytes; }

  const Machine& machine_;
  Topology topology_;
  Index ranks_;
};

}  // namespace weft::cost
