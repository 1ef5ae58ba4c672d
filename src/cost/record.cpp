#include <algorithm>

#include "cost/engine.h"
#include "text.h"
#include "weft/error.h"

namespace weft::cost {

Record::Record(const Outline& outline, const SimulateOptions& options, Timeline& to)
    : to_(to), detail_(at(outline.ranks), -1), under_way_(at(outline.ranks)) {
  to.ranks.assign(at(outline.ranks), {});
  std::vector<Index> wanted = options.detail;
  if (options.busiest)
    wanted.push_back(std::max_element(outline.pairs.begin(), outline.pairs.end()) - outline.pairs.begin());
  for (const Index rank : wanted) {
    if (rank < 0 || rank >= outline.ranks)
      throw Error(text("details of rank ", rank, " of ", outline.ranks), "ranks count from 0");
    if (detail_[at(rank)] >= 0) continue;
    detail_[at(rank)] = static_cast<std::int32_t>(to.detail.size());
    to.detail.push_back({rank, {}});
  }
}

void Record::keep(Index rank, const TimelineEvent& event) {
  const std::int32_t place = detail_[at(rank)];
  if (place >= 0) to_.detail[at(place)].events.push_back(event);
}

void Record::compute(Index rank, const Op& op, double begin, double end, double pairs) {
  RankTimes& times = to_.ranks[at(rank)];
  times.compute += end - begin;
  std::vector<Interval>& exchanges = under_way_[at(rank)];
  double last = begin;  // intervals may overlap each other
  std::sort(exchanges.begin(), exchanges.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  for (const Interval& i : exchanges) {
    const double from = std::max(i.begin, last), to = std::min(i.end, end);
    if (to <= from) continue;
    times.overlapped += to - from;
    last = to;
  }
  std::erase_if(exchanges, [&](const Interval& i) { return i.end <= end; });
  keep(rank, {.kind = TimelineEvent::Kind::compute,
              .name = op.name,
              .step = op.step,
              .begin = begin,
              .end = end,
              .pairs = static_cast<Index>(pairs)});
}

void Record::rows(Index rank, const Op& op, double begin, double end) {
  if (end <= begin) return;
  to_.ranks[at(rank)].rows += end - begin;
  keep(rank, {.kind = TimelineEvent::Kind::rows, .name = op.name, .step = op.step, .begin = begin, .end = end});
}

void Record::wait(Index rank, const Op& op, double begin, double end) {
  if (end <= begin) return;
  to_.ranks[at(rank)].waiting += end - begin;
  keep(rank, {.kind = TimelineEvent::Kind::wait, .name = op.name, .step = op.step, .begin = begin, .end = end});
}

void Record::exchange(Index rank, const Op& op, const Load& load, double begin, double end) {
  RankTimes& times = to_.ranks[at(rank)];
  times.exchange += end - begin;
  times.bytes_in += load.bytes_in;
  times.bytes_out += load.bytes_out;
  keep(rank, {.kind = TimelineEvent::Kind::exchange,
              .name = op.name,
              .step = op.step,
              .begin = begin,
              .end = end,
              .bytes_in = load.bytes_in,
              .bytes_out = load.bytes_out});
}

void Record::end(Index rank, double time) {
  to_.ranks[at(rank)].end = time;
  to_.seconds = std::max(to_.seconds, time);
}

double Record::slowed(Index rank, double begin, double work) const {
  double time = begin;
  for (const Interval& i : under_way_[at(rank)]) {  // sorted by begin
    if (i.interference == 0 || i.end <= time) continue;
    const double free = std::max(0.0, i.begin - time);
    if (work <= free) return time + work;
    work -= free;
    time += free;
    const double done = (i.end - time) * (1 - i.interference);
    if (work <= done) return time + work / (1 - i.interference);
    work -= done;
    time = i.end;
  }
  return time + work;
}

}  // namespace weft::cost
