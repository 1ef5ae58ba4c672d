#include "draw/step_keys.h"

#include <algorithm>

#include "index.h"
#include "weft/error.h"

namespace weft::draw {
namespace {

const Schedule& of(const std::vector<Schedule>& all, Index rank) { return all[at(rank)]; }
const Step& step_of(const Schedule& s, Index step) { return s.steps[at(step)]; }

std::vector<Run> by_row(std::vector<Run> runs) {
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.row < b.row; });
  return runs;
}

// The keys of step 0: the rank's own, or those of its Ulysses group.
std::vector<Run> own(const Schedule& s) {
  const Index group_size = s.ulysses();
  return by_row(s.layouts.k.rank_order({s.rank / group_size * group_size, group_size, 1}).runs());
}

// Appends to `to` the part of `from` (sorted by row) that lies in `rows`, shifted by `by` rows.
void copy_rows(const std::vector<Run>& from, Range rows, Index by, std::vector<Run>& to) {
  auto run = std::upper_bound(from.begin(), from.end(), rows.begin,
                              [](Index row, const Run& r) { return row < r.row + r.count; });
  for (; run != from.end() && run->row < rows.end; ++run) {
    const Index begin = max_of(run->row, rows.begin), end = min_of(run->row + run->count, rows.end);
    to.push_back({begin + by, run->token + (begin - run->row) * run->stride, end - begin, run->stride});
  }
}

// Appends to `to` the rows that a peer, who holds `theirs`, sends to `rank`; they fill the ranges of `into` in order.
void receive(const std::vector<Run>& theirs, const std::vector<PeerRows>& sends, Index rank,
             const std::vector<Range>& into, std::vector<Run>& to) {
  const auto sent = std::find_if(sends.begin(), sends.end(), [&](const PeerRows& p) { return p.peer == rank; });
  if (sent == sends.end()) return;
  auto place = into.begin();
  Index done = 0;  // rows of *place that are filled
  for (Range rows : sent->rows) {
    while (rows.size() > 0 && place != into.end()) {
      const Index count = min_of(rows.size(), place->size() - done);
      copy_rows(theirs, {rows.begin, rows.begin + count}, place->begin + done - rows.begin, to);
      rows.begin += count;
      done += count;
      if (done == place->size()) {
        ++place;
        done = 0;
      }
    }
  }
}

bool sends_to(const std::vector<PeerRows>& sends, Index rank) {
  return std::any_of(sends.begin(), sends.end(), [&](const PeerRows& p) { return p.peer == rank; });
}

// What the first hop of a move in two brought to a rank.
std::vector<Run> relayed(const std::vector<Schedule>& all, Index rank, Index step) {
  std::vector<Run> runs;
  for (const PeerRows& p : step_of(of(all, rank), step).move->relay->receives) {
    const Schedule& peer = of(all, p.peer);
    receive(own(peer), step_of(peer, step).move->relay->sends, rank, p.rows, runs);
  }
  return by_row(std::move(runs));
}

// Calls f(message, whether it was passed on) for what a rank receives: of a peer, first what that one owns.
template <class F>
void for_each_receive(const std::vector<Schedule>& all, Index rank, Index step, F&& f) {
  std::vector<Index> met;
  for (const PeerRows& p : step_of(of(all, rank), step).move->receives) {
    const Move& theirs = *step_of(of(all, p.peer), step).move;
    const bool again = std::find(met.begin(), met.end(), p.peer) != met.end();
    f(p, theirs.relay && (again || !sends_to(theirs.sends, rank)));
    met.push_back(p.peer);
  }
}

// Whose rows a rank passes on to another.
std::vector<Index> owners_passed(const Schedule& from, Index to, Index step) {
  const Relay& relay = *step_of(from, step).move->relay;
  std::vector<Index> owners;
  for (const PeerRows& owner : relay.receives)
    for (const PeerRows& passed : relay.passes) {
      const auto in = [&](const Range& r) {
        return r.begin < owner.rows.front().end && owner.rows.front().begin < r.end;
      };
      if (passed.peer == to && std::any_of(passed.rows.begin(), passed.rows.end(), in)) owners.push_back(owner.peer);
    }
  return owners;
}

// The ranks whose queries a step is about; of a group that swaps heads, one of them.
std::vector<Index> queries_of_step(const Schedule& s, Index step) {
  if (s.query_moves.empty()) return {s.rank};
  const Range rows = step_of(s, step).queries;
  std::vector<Index> owners;
  if (rows.begin < s.q_rows) owners.push_back(s.rank);
  for (const QueryMove& move : s.query_moves)
    for (const PeerRows& p : move.receives)
      for (const Range& r : p.rows)
        if (r.begin < rows.end && rows.begin < r.end) owners.push_back(p.peer);
  return owners;
}

// For each group the groups whose keys it holds at a step, given those of the step before.
using Held = std::vector<std::vector<Index>>;
Held next(const std::vector<Schedule>& all, const Held& before, Index step) {
  const Index group_size = all.front().ulysses();
  Held held(before.size());
  for (std::size_t group = 0; group < held.size(); ++group) {
    const Schedule& s = of(all, static_cast<Index>(group) * group_size);
    if (step >= static_cast<Index>(s.steps.size())) continue;
    const std::optional<Move>& move = step_of(s, step).move;
    if (step_of(s, step).again) {
      held[group] = before[group];
    } else if (!move) {
      held[group] = {static_cast<Index>(group)};
    } else if (move->kind == Move::Kind::shift) {
      for (const PeerRows& p : move->receives) {
        const std::vector<Index>& theirs = before[at(p.peer / group_size)];
        held[group].insert(held[group].end(), theirs.begin(), theirs.end());
      }
    } else {
      for_each_receive(all, s.rank, step, [&](const PeerRows& p, bool passed) {
        if (!passed) held[group].push_back(p.peer / group_size);
        for (const Index owner : passed ? owners_passed(of(all, p.peer), s.rank, step) : std::vector<Index>{})
          held[group].push_back(owner / group_size);
      });
    }
  }
  return held;
}

}  // namespace

std::vector<Run> keys_of_step(const std::vector<Schedule>& all, Index rank, Index step) {
  const Schedule& s = of(all, rank);
  while (step_of(s, step).again) --step;
  const std::optional<Move>& move = step_of(s, step).move;
  if (!move) return own(s);
  std::vector<Run> runs;
  const bool shift = move->kind == Move::Kind::shift;
  for_each_receive(all, rank, step, [&](const PeerRows& p, bool passed) {
    const Schedule& peer = of(all, p.peer);
    const Move& theirs = *step_of(peer, step).move;
    if (passed)
      receive(relayed(all, p.peer, step), theirs.relay->passes, rank, p.rows, runs);
    else
      receive(shift ? keys_of_step(all, p.peer, step - 1) : own(peer), theirs.sends, rank, p.rows, runs);
  });
  return by_row(std::move(runs));
}

std::vector<Index> meeting_steps(const std::vector<Schedule>& all) {
  const Index group_size = all.front().ulysses(), groups = static_cast<Index>(all.size()) / group_size;
  std::vector<Index> near(at(groups), -1), table(at(groups * groups), -1);
  Held held(at(groups));
  for (Index step = 0; step < static_cast<Index>(all.front().steps.size()); ++step) {
    held = next(all, held, step);
    for (Index group = 0; group < groups; ++group) {
      for (const Index q : queries_of_step(of(all, group * group_size), step)) {
        for (const Index k : held[at(group)]) {
          Index& known = table[at(q / group_size * groups + k)];
          if (known < 0) known = step;
        }
      }
    }
  }
  bool by_distance = true;
  for (Index q = 0; q < groups; ++q) {
    for (Index k = 0; k < groups; ++k) {
      const Index step = table[at(q * groups + k)];
      Index& known = near[at((q - k + groups) % groups)];
      if (step >= 0 && known >= 0 && step != known) by_distance = false;
      if (step >= 0) known = step;
    }
  }
  return by_distance ? near : table;
}

}  // namespace weft::draw
