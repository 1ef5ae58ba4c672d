#include "explain/loads.h"

#include <algorithm>

#include "index.h"

namespace weft::tool {
namespace {

// The work spent on counting slices over all ranks, in sequences looked at (some 10 ns each); a slice costs as much as
// ten. A few seconds in all.
constexpr Index kWork = 300'000'000, kSliceWork = 10;

// Counts the real tokens of a stream, without padding.
class RealTokens {
 public:
  explicit RealTokens(const Stream& stream) : stream_(stream), before_{0} {
    for (const Index n : stream.used_lengths()) before_.push_back(before_.back() + n);
  }

  Index in(const Run& run) const {
    if (run.stride == 1) return upto(run.token + run.count) - upto(run.token);
    Index count = 0;
    for (Index i = 0; i < stream_.sequences(); ++i) {
      const Index begin = stream_.offset(i);
      count += rows_before(run, begin + stream_.used(i)) - rows_before(run, begin);
    }
    return count;
  }

 private:
  static Index rows_before(const Run& run, Index token) {
    return std::clamp(ceil_div(token - run.token, run.stride), Index{0}, run.count);
  }

  Index upto(Index token) const {
    const std::span<const Index> offsets = stream_.offsets();
    const auto after = std::upper_bound(offsets.begin(), offsets.end(), token);
    if (after == offsets.begin()) return 0;
    const Index i = after - offsets.begin() - 1;  // the last sequence that begins at or before the token
    if (i == stream_.sequences()) return before_.back();
    return before_[at(i)] + min_of(token - stream_.offset(i), stream_.used(i));
  }

  const Stream& stream_;
  std::vector<Index> before_;
};

// A rank's own rows in the key buffer, sorted.
std::vector<Range> own_keys(const Layout& keys, KeyOrder order, Index rank) {
  if (order == KeyOrder::rank) return {{rank * keys.rows(), (rank + 1) * keys.rows()}};
  std::vector<Range> own;
  for (const Run& run : keys.runs(rank).runs()) own.push_back({run.token, run.token + run.count});
  std::sort(own.begin(), own.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  return own;
}

Index size_of_common(const std::vector<Range>& a, const std::vector<Range>& b) {
  Index size = 0;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    size += Range{max_of(a[i].begin, b[j].begin), min_of(a[i].end, b[j].end)}.size();
    (a[i].end < b[j].end ? i : j) += 1;
  }
  return size;
}

Touched touched_by(const Plan& plan, const std::vector<Range>& own) {
  const std::vector<Range> touched = touched_keys(plan);
  Touched t{.slices = static_cast<Index>(plan.slices.size())};
  for (const Range& r : touched) t.keys += r.size();
  t.remote = t.keys - size_of_common(touched, own);
  return t;
}

// 0, then ranks / 2, then the quarters, and so on: any prefix is spread evenly over the ranks.
std::vector<Index> spread_order(Index ranks) {
  std::vector<Index> order;
  Index step = 1;
  while (step < ranks) step *= 2;
  order.push_back(0);
  for (step /= 2; step > 0; step /= 2)
    for (Index r = step; r < ranks; r += 2 * step) order.push_back(r);
  return order;
}

}  // namespace

RunList key_buffer(const Layouts& layouts, KeyOrder order) {
  return order == KeyOrder::rank ? layouts.k.rank_order() : layouts.k.sequence_order();
}

Loads loads_of(const check::Case& c, const Problem& problem, const Layouts& layouts, KeyOrder order) {
  Loads all;
  all.q_rows = layouts.q.rows();
  all.bytes_per_key = c.heads_k * (c.dim_qk + c.dim_v) * size_of(c.dtype);
  all.gathered_keys = (c.ranks - 1) * layouts.k.rows();
  all.ranks.resize(at(c.ranks));

  const std::vector<Index> pairs = pairs_by_rank(problem, layouts.q);
  all.imbalance = imbalance(pairs);
  const double mean = static_cast<double>(problem.visible_pairs()) / static_cast<double>(c.ranks);
  const RealTokens real(problem.packing().q());
  for (Index r = 0; r < c.ranks; ++r) {
    RankLoad& load = all.ranks[at(r)];
    load.pairs = pairs[at(r)];
    if (mean > 0) load.of_mean = static_cast<double>(load.pairs) / mean;
    for (const Run& run : layouts.q.runs(r).runs()) load.tokens += real.in(run);
  }

  const RunList keys = key_buffer(layouts, order);
  Index work = 0;
  for (const Index r : spread_order(c.ranks)) {
    if (work > kWork) break;
    const Plan plan = make_plan(problem, layouts.q.runs(r), keys);
    work += kSliceWork * static_cast<Index>(plan.slices.size()) + problem.packing().sequences();
    all.ranks[at(r)].touched = touched_by(plan, own_keys(layouts.k, order, r));
    ++all.counted;
  }
  return all;
}

}  // namespace weft::tool
