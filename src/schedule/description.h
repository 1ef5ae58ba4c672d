// A schedule, said once for all ranks. One rank's plans and moves (build.cpp), the simulator's sizes and the quick
// estimate of `choose` are made from the same description.
#pragma once

#include "index.h"
#include "weft/schedule.h"

namespace weft::schedule {

// All that a description may depend on.
struct Shape {
  Index ranks = 1;
  Index heads_q = 1, heads_k = 1;
  Index key_stride = 1;  // of the layout of the keys
};

// Ranks stand in groups: of `Description::ulysses` ranks that swapped heads for sequence, otherwise of one rank each. A
// step brings the keys of some groups from the ranks at the own place in those groups.
struct StepDescription {
  // gather: all rows, straight from their owners. send: the same, of the rows that are seen. shift: from the step
  // before, if that is a shift too, otherwise from the owners. None: the own keys, which need not move.
  std::optional<Move::Kind> move = {};
  Range distances = {0, 1};  // groups whose keys are met: so far before the own group, around all groups
  bool again = false;        // of no move: the keys of the step before, which were brought
  Range queries = {0, 1};    // in a mesh: 0 the own, n those of the rank n places before in the group
  // Distances count nodes, all groups of which are met. A send does not meet the own group, unless `own`.
  bool by_node = false;
  bool own = false;             // of a send: the own rows that are seen stand in the same buffer
  bool sequence_order = false;  // a gather of all groups: keys by token, not by rank
  // Which part of the K/V heads. After a swap it is a head group, which is swapped before its steps: all steps have as
  // many parts, those of a part stand together, and each part meets the same keys in the same order.
  Index head_part = 0, parts = 1;
};

struct Description {
  // Ranks of a group that attend each other's queries; each meets the keys of the ranks at its own place in the groups.
  Index query_ranks = 1;
  Index ulysses = 0;  // ranks of a group, which swap heads for sequence before the steps; 0: no swap
  std::vector<StepDescription> steps = {};
  // Groups of a node, whose links are fast. If more than 1, keys of other nodes come in two hops (Move::relay): those
  // of a gather of all groups, or of steps by_node. A gather by_node is of one node.
  Index node = 1;
};

struct Definition {
  std::string_view name, help;
  std::vector<std::string_view> other_names = {};
  std::vector<std::string_view> options = {};  // of the table in options.cpp
  // Error for options that do not go with the shape. Numbers below 1 were refused before.
  Description (*describe)(const ScheduleOptions& options, const Shape& shape) = nullptr;
  // What is worth a try for `auto`; `levels` are the ranks that each level of the machine's links joins.
  std::vector<ScheduleOptions> (*candidates)(const Shape& shape, std::span<const Index> levels) = nullptr;
  bool source = false;               // may bring rows of a source in place of K and V
  std::string_view by_lengths = {};  // why its steps are planned where lengths are known; empty: they need not be
  bool outer = false;                // may bring the keys of the other groups of a hybrid
  bool composed = false;             // takes the options of ScheduleOptions::outer too
  int tie_order = 100;  // of schedules that are predicted to take the same, `auto` takes the one with the lowest
};

std::span<const Definition> registry();
const Definition& definition(ScheduleKind kind);

// Checks the options and describes the schedule. Error for what its definition refuses.
Description describe_schedule(const ScheduleOptions& options, const Shape& shape);
// The candidates of all definitions, those of the lowest tie_order first.
std::vector<ScheduleOptions> all_candidates(const Shape& shape, std::span<const Index> levels);

// All groups' keys are met at once, in the same order on every rank.
inline bool meets_all(const StepDescription& step, Index groups) {
  return step.move == Move::Kind::gather && !step.by_node && step.distances == Range{0, groups};
}
// All keys of one node: the own, in one hop, or another, in two.
inline bool meets_node(const StepDescription& step) { return step.move == Move::Kind::gather && step.by_node; }
// Whether its keys come in two hops.
inline bool relays(const Description& d, const StepDescription& step) {
  return d.node > 1 && step.move && !(meets_node(step) && step.distances.begin == 0);
}
inline bool is_shift(const Description& d, Index n) {
  return n >= 0 && n < static_cast<Index>(d.steps.size()) && d.steps[at(n)].move == Move::Kind::shift;
}
// Do these steps meet the same keys, for other heads?
inline bool same_keys(const StepDescription& a, const StepDescription& b) {
  return a.move == b.move && a.distances == b.distances && a.by_node == b.by_node &&
         a.sequence_order == b.sequence_order && a.again == b.again && a.queries == b.queries;
}
// The step before step n that meets the same keys, for other heads; -1: none.
Index step_of_same_keys(const Description& d, Index n);
// Head groups of the swap; 1 if there is none.
inline Index swapped_groups(const Description& d) {
  return d.ulysses > 0 && !d.steps.empty() ? d.steps.front().parts : 1;
}
// The steps once for each head group.
std::vector<StepDescription> in_head_groups(const std::vector<StepDescription>& steps, Index groups);
// Error if there are more head groups than heads; `which` names those.
void check_head_groups(Index groups, Index heads, std::string_view which);
// The candidates, and each of them in nodes of the ranks that the innermost level joins, if there are several nodes.
std::vector<ScheduleOptions> with_nodes(std::vector<ScheduleOptions> all, const Shape& shape,
                                        std::span<const Index> levels);
// Groups of a node for so many groups: 1 if there is only one node. Error unless nodes divide them.
Index groups_a_node(Index node, Index groups);
// How many groups further shift n sends what came in step n - 1; 0: it takes the keys from their owners.
Index relay_distance(const Description& d, Index n);
// Distances of shift n whose keys travel no further, so that their gradients go home.
Range last_met(const Description& d, Index n);

}  // namespace weft::schedule
