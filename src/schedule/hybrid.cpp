// Ulysses among consecutive ranks, and another schedule between these groups.
#include <set>

#include "schedule/description.h"
#include "text.h"

namespace weft::schedule {
namespace {

// Groups of a node: ranks at the same place in their groups exchange keys. A group that is as large as a node, or
// larger, has one such rank in each.
Index groups_in(const ScheduleOptions& o) {
  if (!uses(o, "node") || o.ulysses % o.node == 0) return 1;
  if (o.node % o.ulysses == 0) return o.node / o.ulysses;
  throw Error(text("groups of ulysses = ", o.ulysses, " ranks and nodes of ", o.node, " ranks cut each other"),
              "use a Ulysses degree that divides the ranks of a node, or a multiple of them");
}

Description describe(const ScheduleOptions& o, const Shape& shape) {
  if (shape.ranks % o.ulysses != 0)
    throw Error(text("groups of ulysses = ", o.ulysses, " ranks do not divide ", shape.ranks, " ranks"),
                "use a Ulysses degree that divides them");
  check_head_groups(o.head_groups, shape.heads_k, "K/V");
  Shape groups = shape;
  groups.ranks /= o.ulysses;
  ScheduleOptions outer = o;
  outer.node = groups_in(o);
  // A group of one rank swaps nothing, so that only a gather has groups of heads.
  if (o.ulysses == 1) return definition(o.outer).describe(outer, groups);
  outer.head_groups = 1;
  Description d = definition(o.outer).describe(outer, groups);
  d.ulysses = o.ulysses;
  d.steps = in_head_groups(d.steps, o.head_groups);
  return d;
}

// Swaps are cheap where links are fast: groups as large as each level of links, and small ones. With head groups as far
// as each of them has K/V heads of its own, which then cross once.
std::vector<ScheduleOptions> candidates(const Shape& shape, std::span<const Index> levels) {
  constexpr Index kHeadGroups = 4;
  std::set<Index> degrees = {2, 4, 8};
  degrees.insert(levels.begin(), levels.end());
  std::vector<ScheduleOptions> all;
  for (const Index degree : degrees) {
    if (degree < 2 || degree >= shape.ranks || shape.ranks % degree != 0 || degree > shape.heads_q) continue;
    std::vector<ScheduleOptions> flat = {{.ulysses = degree, .outer = ScheduleKind::ring},
                                         {.ulysses = degree, .outer = ScheduleKind::all_gather}};
    // A node holds several groups: what they want enters it once.
    if (levels.size() > 1 && levels.front() % degree == 0 && levels.front() > degree)
      flat = with_nodes(std::move(flat), shape, levels);
    if (shape.ranks / degree > 2) flat.push_back({.ulysses = degree, .ranks_per_step = 1});
    const Index groups = min_of(kHeadGroups, shape.heads_k / degree);
    for (const ScheduleOptions& each : flat) {
      all.push_back(each);
      if (groups < 2) continue;
      all.push_back(each);
      all.back().head_groups = groups;
    }
  }
  return all;
}

}  // namespace

Definition hybrid() {
  return {.name = "hybrid",
          .help = "all_to_all in groups of ranks, ring or all_gather between the groups",
          .other_names = {"a2a+p2p", "usp"},
          .options = {"ulysses", "outer", "head_groups"},
          .describe = describe,
          .candidates = candidates,
          .source = true,
          .composed = true,
          .tie_order = 4};
}

}  // namespace weft::schedule
