// Each rank is sent the rows that its slices touch and no others: a window moves a halo, a document on one rank
// nothing.
#include <algorithm>

#include "schedule/schedules.h"
#include "text.h"
#include "weft/error.h"

namespace weft::schedule {
namespace {

// Adds the slices of a plan against a peer's rows, of which only `touched` are in the buffer, from row `first` on.
void add_slices(const Plan& plan, const std::vector<Range>& touched, Index first, std::vector<Slice>& slices) {
  std::vector<Index> places;  // of the touched ranges in the buffer
  for (const Range& r : touched) {
    places.push_back(first);
    first += r.size();
  }
  for (const Slice& given : plan.slices) {
    Slice s = trimmed(given, true);
    // A slice touches one range of keys, so it lies in one of the ranges.
    const auto at = std::upper_bound(touched.begin(), touched.end(), s.k_begin,
                                     [](Index row, const Range& r) { return row < r.begin; }) -
                    touched.begin() - 1;
    const Index by = places[static_cast<std::size_t>(at)] - touched[static_cast<std::size_t>(at)].begin;
    s.k_begin += by;
    s.k_end += by;
    s.lo = shift_bound(s.lo, by);
    s.hi = shift_bound(s.hi, by);
    slices.push_back(s);
  }
}

}  // namespace

void exact(Schedule& s) {
  const Layout &q = s.layouts.q, &k = s.layouts.k;
  const Range heads_q{0, s.heads_q}, heads_k{0, s.heads_k};
  s.plans.push_back(make_plan(s.problem, q.runs(s.rank), k.runs(s.rank)));
  s.steps.push_back({.key_rows = s.k_rows, .heads_q = heads_q, .heads_k = heads_k});
  // Peers at the same distance are in the same stage on every rank, so that both sides of a message agree.
  const Index others = s.ranks - 1, stages = min_of(s.options.stages, others);
  for (Index stage = 0; stage < stages; ++stage) {
    Move move{.kind = Move::Kind::send, .sends = {}, .receives = {}};
    Plan plan{.slices = {}, .q_rows = s.q_rows, .k_rows = 0};
    const Range distances = stage_distances(s.ranks, stages, stage);
    for (Index distance = distances.begin; distance < distances.end; ++distance) {
      const Index from = (s.rank - distance + s.ranks) % s.ranks, to = (s.rank + distance) % s.ranks;
      const Plan part = make_plan(s.problem, q.runs(s.rank), k.runs(from));
      const std::vector<Range> touched = touched_keys(part);
      if (!touched.empty()) {
        add_slices(part, touched, plan.k_rows, plan.slices);
        const Index rows = rows_in(touched);
        move.receives.push_back({from, {{plan.k_rows, plan.k_rows + rows}}});
        plan.k_rows += rows;
      }
      std::vector<Range> wanted = touched_keys(make_plan(s.problem, q.runs(to), k.runs(s.rank)));
      if (!wanted.empty()) move.sends.push_back({to, std::move(wanted)});
    }
    s.steps.push_back({.move = std::move(move),
                       .key_rows = plan.k_rows,
                       .plan = static_cast<Index>(s.plans.size()),
                       .heads_q = heads_q,
                       .heads_k = heads_k});
    s.plans.push_back(std::move(plan));
  }
}

}  // namespace weft::schedule
