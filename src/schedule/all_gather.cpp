// Every rank gathers all K and V, at once or a group of heads at a time.
#include <algorithm>

#include "schedule/schedules.h"
#include "text.h"
#include "weft/error.h"

namespace weft::schedule {
namespace {

// Rows of the gathered buffer that a rank's rows become.
std::vector<Range> places(const Layout& layout, Index rank, bool sequence_order) {
  if (!sequence_order) return {{rank * layout.rows(), (rank + 1) * layout.rows()}};
  std::vector<weft::Run> runs = layout.runs(rank).runs();
  std::sort(runs.begin(), runs.end(), [](const weft::Run& a, const weft::Run& b) { return a.row < b.row; });
  std::vector<Range> to;
  for (const weft::Run& run : runs) {
    if (!to.empty() && to.back().end == run.token)
      to.back().end += run.count;
    else
      to.push_back({run.token, run.token + run.count});
  }
  return to;
}

// Own rows in the order in which places() lists where they go: all of them, or those that hold tokens.
std::vector<Range> own_rows(const Layout& layout, Index rank, bool sequence_order) {
  if (!sequence_order) return {{0, layout.rows()}};
  std::vector<Range> rows;
  for (const weft::Run& run : layout.runs(rank).runs()) rows.push_back({run.row, run.row + run.count});
  std::sort(rows.begin(), rows.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  std::vector<Range> joined;
  for (const Range& r : rows) {
    if (!joined.empty() && joined.back().end == r.begin)
      joined.back().end = r.end;
    else
      joined.push_back(r);
  }
  return joined;
}

// Query heads of K/V heads [begin, end): one range, or Error.
Range heads_of(const Heads& heads, Range k) {
  if (heads.map.empty()) return {k.begin * (heads.q / heads.k), k.end * (heads.q / heads.k)};
  Range q{heads.q, 0};
  Index count = 0;
  for (Index h = 0; h < heads.q; ++h) {
    const Index of = heads.map[static_cast<std::size_t>(h)];
    if (of < k.begin || of >= k.end) continue;
    q = {min_of(q.begin, h), h + 1};
    ++count;
  }
  if (count > 0 && q.size() != count)
    throw Error(text("query heads of K/V heads ", k.begin, " to ", k.end - 1, " do not lie side by side"),
                "use head_groups = 1, or a head map that never falls");
  return count > 0 ? q : Range{};
}

}  // namespace

void all_gather(Schedule& s, const Heads& heads) {
  const Layout& k = s.layouts.k;
  const Index groups = s.options.head_groups;
  if (groups < 1 || groups > s.heads_k)
    throw Error(text("head_groups ", groups, " with ", s.heads_k, " K/V heads"),
                text("use from 1 to ", s.heads_k, " groups"));
  const bool sequence = s.options.key_order == KeyOrder::sequence ||
                        (s.options.key_order == KeyOrder::automatic && k.rank_order().stride() == 1);
  const RunList keys = sequence ? k.sequence_order() : k.rank_order();
  s.plans.push_back(make_plan(s.problem, s.layouts.q.runs(s.rank), keys));
  Move move{.kind = Move::Kind::gather, .sends = {}, .receives = {}};
  const std::vector<Range> own = own_rows(k, s.rank, sequence);
  for (Index peer = 0; peer < s.ranks; ++peer) {
    move.sends.push_back({peer, own});
    move.receives.push_back({peer, places(k, peer, sequence)});
  }
  for (Index g = 0; g < groups; ++g) {
    const Range heads_k{s.heads_k * g / groups, s.heads_k * (g + 1) / groups};
    s.steps.push_back(
        {.move = move, .key_rows = keys.rows(), .plan = 0, .heads_q = heads_of(heads, heads_k), .heads_k = heads_k});
  }
}

}  // namespace weft::schedule
