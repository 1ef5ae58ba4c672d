// Moves in two hops: into each node once, then inside it.
#include "schedule/build.h"
#include "schedule/groups.h"

namespace weft::schedule {
namespace {

// The groups of the own node and of others, by place: the own place is that of the ranks that rows come from and go to.
class Nodes {
 public:
  Nodes(const Groups& groups, Index node)
      : node_(node), count_(groups.count() / node), mine_(groups.mine() / node), place_(groups.mine() % node) {}

  Index size() const { return node_; }
  Index place() const { return place_; }
  Index mine() const { return mine_; }
  Index at_distance(Index distance) const { return floor_mod(mine_ - distance, count_); }
  Index group(Index node, Index place) const { return node * node_ + place; }
  Range others() const { return {1, count_}; }  // their distances

 private:
  Index node_, count_, mine_, place_;
};

// Rows of a buffer that holds `held` ranges one after another, from row `first` on: where `wanted`, each inside one of
// them, lie.
void append_rows_of(const std::vector<Range>& wanted, const std::vector<Range>& held, Index first,
                    std::vector<Range>& to) {
  std::size_t n = 0;
  for (const Range& w : wanted) {
    for (; held[n].end < w.end; ++n) first += held[n].size();
    append(to, {first + w.begin - held[n].begin, first + w.end - held[n].begin});
  }
}

}  // namespace

Move gather_by_node(const Groups& groups, Index node, bool sequence_order) {
  const Nodes nodes(groups, node);
  Move move{.kind = Move::Kind::gather, .sends = {}, .receives = {}};
  Relay relay{.sends = {}, .receives = {}, .passes = {}};
  const std::vector<Range> own = groups.placed(groups.mine(), sequence_order).rows;
  for (Index d = nodes.others().begin; d < nodes.others().end; ++d) {
    relay.sends.push_back({groups.peer(nodes.group(nodes.at_distance(-d), nodes.place())), own});
    const Index from = nodes.group(nodes.at_distance(d), nodes.place());
    const Index rows = rows_in(groups.placed(from, sequence_order).rows);
    relay.receives.push_back({groups.peer(from), {{relay.rows, relay.rows + rows}}});
    relay.rows += rows;
  }
  for (Index place = 0; place < node; ++place) {
    const Index mate = nodes.group(nodes.mine(), place);
    move.sends.push_back({groups.peer(mate), own});
    move.receives.push_back({groups.peer(mate), groups.placed(mate, sequence_order).to});
    relay.passes.push_back({groups.peer(mate), {{0, relay.rows}}});
  }
  for (Index place = 0; place < node; ++place) {
    PeerRows passed{groups.peer(nodes.group(nodes.mine(), place)), {}};
    for (Index d = nodes.others().begin; d < nodes.others().end; ++d)
      for (const Range& r : groups.placed(nodes.group(nodes.at_distance(d), place), sequence_order).to)
        append(passed.rows, r);
    move.receives.push_back(std::move(passed));
  }
  move.relay = std::move(relay);
  return move;
}

NodeAtDistance gather_node(const Groups& groups, Index node, Index distance) {
  const Nodes nodes(groups, node);
  const Index from = nodes.at_distance(distance), to = nodes.at_distance(-distance), rows = groups.rows();
  Move move{.kind = Move::Kind::gather, .sends = {}, .receives = {}};
  Relay relay{.sends = {}, .receives = {}, .rows = rows, .passes = {}};
  relay.sends.push_back({groups.peer(nodes.group(to, nodes.place())), {{0, rows}}});
  relay.receives.push_back({groups.peer(nodes.group(from, nodes.place())), {{0, rows}}});
  for (Index place = 0; place < node; ++place) {
    const Index mate = groups.peer(nodes.group(nodes.mine(), place));
    (distance == 0 ? move.sends : relay.passes).push_back({mate, {{0, rows}}});
    move.receives.push_back({mate, {{place * rows, (place + 1) * rows}}});
  }
  if (distance > 0) move.relay = std::move(relay);
  return {nodes.group(from, 0), std::move(move)};
}

Move send_by_node(const Groups& groups, Index node, Range distances, Met met, Plan& plan) {
  const Nodes nodes(groups, node);
  const Index me = groups.mine(), first = nodes.group(nodes.mine(), 0);
  Move move{.kind = Move::Kind::send, .sends = {}, .receives = {}};
  Relay relay{.sends = {}, .receives = {}, .passes = {}};
  std::vector<PeerRows> passed;  // by place: rows of the step's buffer
  for (Index place = 0; place < node; ++place) {
    passed.push_back({groups.peer(first + place), {}});
    relay.passes.push_back({groups.peer(first + place), {}});
  }
  // Adds what the own queries see of a group; returns where it lies in the buffer.
  const auto meet = [&](Index group) {
    const Plan part = groups.plan(group);
    const std::vector<Range> touched = touched_keys(part);
    add_touched(part, touched, plan.k_rows, plan.slices);
    const Range rows{plan.k_rows, plan.k_rows + rows_in(touched)};
    plan.k_rows = rows.end;
    return rows;
  };
  for (Index d = distances.begin; d < distances.end; ++d) {
    if (d == 0) {
      for (Index mate = first; mate < first + node; ++mate) {
        if (mate == me && !met.own) continue;
        if (const Range rows = meet(mate); rows.size() > 0) move.receives.push_back({groups.peer(mate), {rows}});
        std::vector<Range> wanted = groups.touched(mate, 1, me);
        if (!wanted.empty()) move.sends.push_back({groups.peer(mate), std::move(wanted)});
      }
      continue;
    }
    const Index from = nodes.at_distance(d), to = nodes.at_distance(-d);
    for (Index place = 0; place < node; ++place)
      if (const Range rows = meet(nodes.group(from, place)); rows.size() > 0) append(passed[at(place)].rows, rows);
    const Index source = nodes.group(from, nodes.place());
    const std::vector<Range> held = groups.touched(first, node, source);
    if (!held.empty()) {
      for (Index place = 0; place < node; ++place)
        append_rows_of(groups.touched(first + place, 1, source), held, relay.rows, relay.passes[at(place)].rows);
      relay.receives.push_back({groups.peer(source), {{relay.rows, relay.rows + rows_in(held)}}});
      relay.rows += rows_in(held);
    }
    std::vector<Range> wanted = groups.touched(nodes.group(to, 0), node, me);
    if (!wanted.empty()) relay.sends.push_back({groups.peer(nodes.group(to, nodes.place())), std::move(wanted)});
  }
  const auto nothing = [](const PeerRows& p) { return p.rows.empty(); };
  std::erase_if(relay.passes, nothing);
  std::erase_if(passed, nothing);
  for (PeerRows& p : passed) move.receives.push_back(std::move(p));
  move.relay = std::move(relay);
  return move;
}

}  // namespace weft::schedule
