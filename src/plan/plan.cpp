#include "weft/plan.h"

#include <algorithm>
#include <variant>

#include "index.h"
#include "plan/cut.h"
#include "plan/layout_data.h"
#include "plan/plan_subset.h"
#include "plan/visible_pairs.h"
#include "ranges.h"
#include "text.h"

namespace weft {
namespace {

const RegularRuns& lookup(const RegularRuns& runs) { return runs; }
TableRuns lookup(const detail::RunTable& table) { return table.view(); }

// Calls f with the lookups of the two sides.
template <class F>
void with_runs(const RunList& q, const RunList& k, F&& f) {
  std::visit([&](const auto& a, const auto& b) { f(lookup(a), lookup(b)); }, q.source().runs, k.source().runs);
}

// A caller's slices may span sequences, which dual_chunk's arithmetic cannot follow: look its runs up in a table.
RunList searchable(const RunList& list) {
  const auto* regular = std::get_if<RegularRuns>(&list.source().runs);
  if (!regular || regular->cut != RegularRuns::folded_per_sequence) return list;
  return RunList::from_runs(list.runs(), list.rows());
}

template <class F>
void cut_user_slices(std::span<const Slice> slices, const RunList& q, const RunList& k, F&& emit) {
  with_runs(searchable(q), searchable(k), [&](const auto& q_runs, const auto& k_runs) {
    for (const Slice& s : slices)
      q_runs.for_each(0, s.q_begin, s.q_end, Residues{s.q_begin, s.q_end - s.q_begin}, [&](const Run& run) {
        cut_query_run(s, run, 0, k_runs, q.stride(), k.in_sequence_order(), emit);
      });
  });
}

// The stream a layout's runs were made from has to be the problem's: arithmetic uses its offsets.
void check_stream(std::string_view side, const RunList& list, const Stream& stream) {
  if (list.source().owner && !(list.source().owner->stream == stream))
    throw Error(text("the ", side, " layout was made for another stream (", list.source().owner->stream.sequences(),
                     " sequences, ", list.source().owner->stream.tokens(), " tokens) than the problem's (",
                     stream.sequences(), " sequences, ", stream.tokens(), " tokens)"),
                "make the layout from the problem's own packing");
}

// `each` calls its argument with the number of every sequence to plan.
template <class Each>
Plan plan_each(const Problem& problem, const RunList& q, const RunList& k, Each&& each) {
  const Packing& packing = problem.packing();
  if (q.stride() != k.stride())
    throw Error(text("query runs have stride ", q.stride(), " and key runs have stride ", k.stride()),
                "lay both sides out alike; striped queries go with keys in rank order, not in sequence order");
  Plan plan{{}, q.rows(), k.rows()};
  const auto emit = [&](const Slice& s) { plan.slices.push_back(s); };
  if (problem.mask().slices) {
    cut_user_slices(problem.own_slices(), q, k, emit);
    return plan;
  }
  with_runs(q, k, [&](const auto& q_runs, const auto& k_runs) {
    const SequencePlanner planner{view(packing.q()), view(packing.k()),    view(problem.mask()), q_runs, k_runs,
                                  q.stride(),        k.in_sequence_order()};
    each([&](Index i) { planner.for_each(i, emit); });
  });
  return plan;
}

}  // namespace

Plan make_plan(const Problem& problem, const RunList& q, const RunList& k) {
  check_stream("query", q, problem.packing().q());
  check_stream("key", k, problem.packing().k());
  return plan_each(problem, q, k, [&](auto&& plan) {
    for (Index i = 0; i < problem.packing().sequences(); ++i) plan(i);
  });
}

Plan make_plan(const Problem& problem, const RunList& q, const RunList& k, std::span<const Index> sequences) {
  return plan_each(problem, q, k, [&](auto&& plan) {
    for (const Index i : sequences) plan(i);
  });
}

std::vector<Index> sequences_in(const Stream& stream, const RunList& runs) {
  const std::span<const Index> offsets = stream.offsets();
  std::vector<Index> found;
  for (const Run& r : runs.runs()) {
    const Index last = r.token + (r.count - 1) * r.stride;
    Index i = std::upper_bound(offsets.begin(), offsets.end(), r.token) - offsets.begin() - 1;
    for (; i >= 0 && i < stream.sequences() && stream.offset(i) <= last; ++i) found.push_back(i);
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

Index visible_pairs(const Slice& s) { return visible_pairs(s, Run{0, s.q_begin, s.q_end - s.q_begin, 1}); }

Index visible_pairs(const Plan& plan) {
  Index pairs = 0;
  for (const Slice& s : plan.slices) pairs += visible_pairs(s);
  return pairs;
}

std::vector<Range> touched_keys(const Plan& plan) {
  std::vector<Range> all;
  for (const Slice& s : plan.slices) all.push_back(touched_keys(s));
  return joined(std::move(all));
}

std::vector<Index> pairs_by_rank(std::span<const Slice> slices, const Layout& layout, const RunList& all) {
  std::vector<Index> pairs(at(layout.ranks()), 0);
  const auto add = [&](const RunList& list, auto&& rank_of) {
    with_runs(list, list, [&](const auto& runs, const auto&) {
      for (const Slice& s : slices)
        runs.for_each(0, s.q_begin, s.q_end, Residues{s.q_begin, s.q_end - s.q_begin}, [&](const Run& run) {
          pairs[at(rank_of(run))] += visible_pairs(s, cut_run(run, s.q_begin, s.q_end));
        });
    });
  };
  if (layout.kind() != LayoutKind::dual_chunk) {  // all ranks at once: a slice is looked at where it lies
    const Index rows = max_of(1, layout.rows());
    add(all, [&](const Run& run) { return run.row / rows; });
    return pairs;
  }
  for (Index rank = 0; rank < layout.ranks(); ++rank)
    add(searchable(layout.runs(rank)), [&](const Run&) { return rank; });
  return pairs;
}

std::vector<Index> pairs_by_rank(const Problem& problem, const Layout& layout) {
  check_stream("query", layout.runs(0), problem.packing().q());
  return pairs_by_rank(problem.global_slices(), layout, layout.rank_order());
}

double imbalance(std::span<const Index> pairs) {
  double sum = 0;
  for (const Index p : pairs) sum += static_cast<double>(p);
  if (sum == 0) return 1;
  const double largest = static_cast<double>(*std::max_element(pairs.begin(), pairs.end()));
  return largest * static_cast<double>(pairs.size()) / sum;
}

}  // namespace weft
