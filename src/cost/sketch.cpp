#include "cost/sketch.h"

#include <algorithm>

#include "index.h"
#include "plan/layout_data.h"
#include "plan/plan_subset.h"

namespace weft::cost {
namespace {

constexpr Index kSamples = 8;

// The rank whose keys are seen most, so that it has most to send: pairs are counted with queries and keys exchanged.
Index most_wanted(std::vector<Slice> transposed, const Layout& k, const RunList& keys) {
  for (Slice& s : transposed) s = {s.k_begin, s.k_end, s.q_begin, s.q_end, -s.hi, -s.lo};
  const std::vector<Index> pairs = pairs_by_rank(transposed, k, keys);
  return std::max_element(pairs.begin(), pairs.end()) - pairs.begin();
}

// Evenly spread, the busiest, and the one that sends most.
std::vector<Index> sampled_ranks(std::vector<Slice> slices, const Layout& k, const RunList& keys,
                                 const std::vector<double>& pairs) {
  const Index ranks = k.ranks();
  std::vector<Index> chosen;
  for (Index n = 0; n < min_of(kSamples, ranks); ++n)
    chosen.push_back(ranks <= kSamples ? n : n * (ranks - 1) / (kSamples - 1));
  if (ranks > kSamples && !pairs.empty()) {
    chosen.push_back(std::max_element(pairs.begin(), pairs.end()) - pairs.begin());
    chosen.push_back(most_wanted(std::move(slices), k, keys));
  }
  std::sort(chosen.begin(), chosen.end());
  chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  return chosen;
}

}  // namespace

Sketch::Sketch(const Layer& layer, const Layouts& layouts, const Machine& machine)
    : layer_(layer),
      layouts_(layouts),
      machine_(machine),
      ranks_(layouts.q.ranks()),
      shape_(schedule::shape_of(layouts, {layer.heads_q, layer.heads_k})),
      base_(schedule::unscheduled(layer.problem, layouts, 0, {layer.heads_q, layer.heads_k}, {})) {
  schedule::require_layouts({}, layouts);  // what no schedule can do
  const RunList keys = layouts.k.rank_order();
  const bool alike = layouts.q.runs(0).source().owner == layouts.k.runs(0).source().owner;
  const RunList queries = alike ? keys : layouts.q.rank_order();
  std::vector<Slice> slices = layer.problem.global_slices();
  // Layouts that cut each sequence are balanced by themselves.
  if (layouts.q.kind() != LayoutKind::dual_chunk && layouts.q.kind() != LayoutKind::striped)
    for (const Index n : pairs_by_rank(slices, layouts.q, queries)) pairs_.push_back(static_cast<double>(n));
  for (const Index rank : sampled_ranks(std::move(slices), layouts.k, keys, pairs_)) {
    samples_.push_back({.rank = rank, .cells = {}, .in_sequence = {}, .sent = {}});
    add_seen(samples_.back(), keys);
    add_sent(samples_.back(), queries);
  }
  slices_ *= static_cast<double>(ranks_) / static_cast<double>(max_of(1, static_cast<Index>(samples_.size())));
}

// What the rank's queries see, and how many rows of each source.
void Sketch::add_seen(Sample& sample, const RunList& keys) {
  const Index group = max_of(1, layer_.heads_q / max_of(1, layer_.heads_k)), rows = max_of(1, layouts_.k.rows());
  std::vector<TileCounter> counters;
  for (const Pass pass : {Pass::forward, Pass::backward})
    if (pass == Pass::forward || layer_.backward)
      counters.emplace_back(group, 1, kernel_rate(machine_, pass, layer_.shape));
  const auto take = [&](TileWork* to) {
    for (std::size_t n = 0; n < counters.size(); ++n) to[n] = counters[n].take();
  };
  const RunList own = layouts_.q.runs(sample.rank);
  const std::vector<Index> seen_in = sequences_in(layer_.problem.packing().q(), own);
  Plan plan = make_plan(layer_.problem, own, keys, seen_in);
  slices_ += static_cast<double>(plan.slices.size());
  std::sort(plan.slices.begin(), plan.slices.end(),
            [](const Slice& a, const Slice& b) { return a.k_begin < b.k_begin; });
  Index touched = 0, end = 0;
  for (std::size_t n = 0; n < plan.slices.size(); ++n) {
    const Slice& s = plan.slices[n];
    for (TileCounter& c : counters) c.add_roughly(s);
    const Range seen = touched_keys(s);
    touched += max_of(0, seen.end - max_of(end, seen.begin));
    end = max_of(end, seen.end);
    const Index source = s.k_begin / rows;
    if (n + 1 < plan.slices.size() && plan.slices[n + 1].k_begin / rows == source) continue;
    sample.cells.push_back({.source = source, .work = {}, .touched = touched});
    take(sample.cells.back().work);
    touched = 0;
  }
  if (shape_.key_stride != 1) return;
  for (const Slice& s : make_plan(layer_.problem, own, layouts_.k.sequence_order(), seen_in).slices)
    for (TileCounter& c : counters) c.add_roughly(s);
  take(sample.in_sequence);
}

// Who sees the rank's own keys, and how many of them: the first keys of a long document go to many.
void Sketch::add_sent(Sample& sample, const RunList& queries) {
  const RunList own = layouts_.k.runs(sample.rank);
  Plan wanted = make_plan(layer_.problem, queries, own, sequences_in(layer_.problem.packing().k(), own));
  const Index q_rows = max_of(1, layouts_.q.rows());
  std::sort(wanted.slices.begin(), wanted.slices.end(), [&](const Slice& a, const Slice& b) {
    return std::pair(a.q_begin / q_rows, a.k_begin) < std::pair(b.q_begin / q_rows, b.k_begin);
  });
  Index last = -1, end = 0;
  for (const Slice& s : wanted.slices) {
    const Index to = s.q_begin / q_rows;
    if (to == sample.rank) continue;
    if (to != last) {
      sample.sent.push_back({to, 0});
      end = 0;
      last = to;
    }
    const Range seen = touched_keys(s);
    sample.sent.back().rows += max_of(0, seen.end - max_of(end, seen.begin));
    end = max_of(end, seen.end);
  }
}

}  // namespace weft::cost
