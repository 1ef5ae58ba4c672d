// What a placement is predicted to take: enough to compare attempts, not a simulation.
#include <algorithm>
#include <numeric>

#include "index.h"
#include "plan/placed/attempt.h"

namespace weft::detail {
namespace {

double rows_as_real(Index n) { return static_cast<double>(n); }

}  // namespace

// Seconds of work with own keys and with others' keys, and K/V rows that come in.
struct Attempt::Busy {
  std::vector<double> own, others;
  std::vector<double> near, far;        // straight from their owners
  std::vector<double> passed, entered;  // in two hops: inside the node, into it
  std::vector<bool> crosses;            // has a part of a sequence that lies on several nodes
  std::vector<Index> joined;            // by node: another one that waits for the same sequences, or itself
  explicit Busy(Index ranks, Index nodes)
      : own(at(ranks), 0.0),
        others(own),
        near(own),
        far(own),
        passed(own),
        entered(own),
        crosses(at(ranks), false),
        joined(at(nodes)) {
    std::iota(joined.begin(), joined.end(), Index{0});
  }
  Index root(Index node) const {
    while (joined[at(node)] != node) node = joined[at(node)];
    return node;
  }
};

void Attempt::add_moves(const Split& split, Busy& busy) const {
  const SequenceWork& s = of(split.sequence);
  const double rows = rows_as_real(s.rows), keys = rows_as_real(s.keys), reach = rows_as_real(s.reach);
  const Index count = static_cast<Index>(split.ranks.size());
  std::vector<Index> in_node(at(nodes_), 0);
  for (const Index rank : split.ranks) ++in_node[at(rank / node_)];
  double before = 0;  // rows of the sequence in earlier chunks
  for (Index n = 0; n < count; ++n) {
    const std::size_t r = at(split.ranks[at(n)]);
    const Index node = split.ranks[at(n)] / node_;
    const double share = rows_as_real(split.share[at(n)]), work = cut(s, count) * share / rows;
    const double elsewhere = std::min(1 - share / rows, share > 0 ? reach / share : 0);
    busy.own[r] += work * (1 - elsewhere);
    busy.others[r] += work * elsewhere;
    const double seen = std::min(std::max(0.0, rows - before - share) / rows * keys, 2 * reach);
    before += share / 2;
    const double same = count > 1 ? rows_as_real(in_node[at(node)] - 1) / rows_as_real(count - 1) : 1;
    busy.near[r] += seen * same;
    busy.far[r] += seen * (1 - same);
    busy.passed[r] += seen;
    if (split.nodes == 1) continue;
    busy.entered[r] += std::min(rows_as_real(split.nodes - 1) * share / rows * keys, 2 * reach);
    busy.crosses[r] = true;
    busy.joined[at(busy.root(node))] = busy.root(split.ranks.front() / node_);
  }
}

// Ranks pass on what entered their node after they have computed with their own keys, so those that wait for each other
// wait for the slowest of them.
double Attempt::relayed(const Busy& busy) const {
  std::vector<std::pair<double, double>> by_group(at(nodes_));  // before and after the keys are there
  double longest = 0;
  for (Index rank = 0; rank < ranks_; ++rank) {
    const std::size_t r = at(rank);
    const double moved = busy.passed[r] * options_.near_seconds + busy.entered[r] * options_.far_seconds;
    const double before = std::max(busy.own[r], moved / 2), after = busy.others[r] + moved / 2;
    longest = std::max(longest, before + after);
    if (!busy.crosses[r]) continue;
    auto& group = by_group[at(busy.root(rank / node_))];
    group.first = std::max(group.first, before);
    group.second = std::max(group.second, after);
  }
  for (const auto& [before, after] : by_group) longest = std::max(longest, before + after);
  return longest;
}

// Everything in groups of heads: all but the first group's keys and the last one's gradients moves under work, and
// nothing is merged. What enters a node is passed on while the next group enters.
double Attempt::grouped(const Busy& busy) const {
  const double shown = 1 / static_cast<double>(options_.head_groups);
  double direct = 0, work = 0, waited = 0, links = 0;
  for (Index rank = 0; rank < ranks_; ++rank) {
    const std::size_t r = at(rank);
    const double mine = busy.own[r] + busy.others[r];
    const double moved = std::max(busy.near[r] * options_.near_seconds, busy.far[r] * options_.far_seconds);
    direct = std::max(direct, std::max(mine + shown * moved, moved + shown * mine));
    const double passed = busy.passed[r] * options_.near_seconds, entered = busy.entered[r] * options_.far_seconds;
    work = std::max(work, mine);
    waited = std::max(waited, passed + entered);
    links = std::max({links, passed, entered});
  }
  return std::min(direct, std::max(work + shown * waited, links + shown * (work + waited)));
}

double Attempt::predicted() const {
  Busy busy(ranks_, nodes_);
  for (std::size_t n = 0; n < whole_.size(); ++n)
    if (whole_[n] >= 0) busy.own[at(whole_[n])] += sequences_[n].seconds;
  for (const Split& split : splits_) add_moves(split, busy);
  // Half of what moves, keys of both passes, can hide under work with own keys; gradients return after all of it.
  double direct = 0, most = 0;
  for (Index rank = 0; rank < ranks_; ++rank) {
    const std::size_t r = at(rank);
    const double moved = std::max(busy.near[r] * options_.near_seconds, busy.far[r] * options_.far_seconds);
    direct = std::max(direct, std::max(busy.own[r], moved / 2) + busy.others[r] + moved / 2);
    most = std::max(most, busy.own[r] + busy.others[r]);
  }
  if (splits_.empty()) return direct;
  const Index rows = *std::max_element(rows_.begin(), rows_.end());
  const double merges = options_.merge_seconds * rows_as_real(rows);
  // A gather in head groups hides most of itself.
  constexpr double kShown = 0.15;
  const double gathered = rows_as_real(rows) * (rows_as_real(node_ - 1) * options_.near_seconds +
                                                rows_as_real(ranks_ - node_) * options_.far_seconds);
  const double stages = std::min(direct, relayed(busy)) + merges, all = most + kShown * gathered;
  return options_.head_groups > 1 ? std::min({stages, grouped(busy), all}) : std::min(stages, all);
}

}  // namespace weft::detail
