#include "draw/times.h"

#include <algorithm>

#include "weft/plan.h"

namespace weft::draw {
namespace {

constexpr Index kRanksDrawn = 32;

std::vector<Index> drawn_ranks(Index ranks) {
  std::vector<Index> drawn;
  const Index count = min_of(ranks, kRanksDrawn);
  for (Index i = 0; i < count; ++i) drawn.push_back(i * ranks / count);
  return drawn;
}

Index rows_of(const std::vector<PeerRows>& all, Index self) {
  Index rows = 0;
  for (const PeerRows& p : all)
    if (p.peer != self)
      for (const Range& r : p.rows) rows += r.size();
  return rows;
}

// Steps with unit costs: a pair and head takes as long as a byte moves in; the mean rank computes for 1.
Timeline by_units(const std::vector<Schedule>& all, const TensorShape& shape) {
  double work = 0;
  for (const Schedule& s : all)
    for (const Step& step : s.steps)
      work += static_cast<double>(visible_pairs(s.plans[static_cast<std::size_t>(step.plan)]) * step.heads_q.size());
  const double unit = std::max(work / static_cast<double>(all.size()), 1.0);
  Timeline timeline;
  timeline.ranks.resize(all.size());
  for (const Index rank : drawn_ranks(static_cast<Index>(all.size()))) {
    const Schedule& s = all[static_cast<std::size_t>(rank)];
    RankTimeline line{.rank = rank, .events = {}};
    double moved = 0, computed = 0, before = 0;  // ends of the last exchange, of the last compute and of the one before
    for (std::size_t i = 0; i < s.steps.size(); ++i) {
      const Step& step = s.steps[i];
      const Index number = static_cast<Index>(i);
      if (step.move) {
        const Index bytes = rows_of(step.move->receives, rank) * step.heads_k.size() * (shape.dim_qk + shape.dim_v) *
                            size_of(shape.dtype);
        const double begin = std::max(moved, before);
        moved = begin + static_cast<double>(bytes) / unit;
        if (bytes > 0)
          line.events.push_back({.kind = TimelineEvent::Kind::exchange, .name = "K, V", .step = number, .begin = begin,
                                 .end = moved, .bytes_in = bytes});
      }
      const Index pairs = visible_pairs(s.plans[static_cast<std::size_t>(step.plan)]) * step.heads_q.size();
      const double begin = std::max(computed, step.move ? moved : 0);
      before = computed;
      computed = begin + static_cast<double>(pairs) / unit;
      if (pairs > 0)
        line.events.push_back({.kind = TimelineEvent::Kind::compute, .name = "attend", .step = number, .begin = begin,
                               .end = computed, .pairs = pairs});
    }
    timeline.seconds = std::max({timeline.seconds, computed, moved});
    timeline.detail.push_back(std::move(line));
  }
  return timeline;
}

}  // namespace

Times make_times(const std::vector<Schedule>& all, const TensorShape& shape) {
  return {.about = "forward, in units of the mean rank's compute", .seconds = false, .timeline = by_units(all, shape)};
}

}  // namespace weft::draw
