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
  Shape groups = shape;
  groups.ranks /= o.ulysses;
  ScheduleOptions outer = o;
  outer.node = groups_in(o);
  Description d = definition(o.outer).describe(outer, groups);
  d.ulysses = o.ulysses > 1 ? o.ulysses : 0;
  return d;
}

// Swaps are cheap where links are fast: groups as large as each level of links, and small ones.
std::vector<ScheduleOptions> candidates(const Shape& shape, std::span<const Index> levels) {
  std::set<Index> degrees = {2, 4, 8};
  degrees.insert(levels.begin(), levels.end());
  std::vector<ScheduleOptions> all;
  for (const Index degree : degrees) {
    if (degree < 2 || degree >= shape.ranks || shape.ranks % degree != 0 || degree > shape.heads_q) continue;
    for (const ScheduleKind outer : {ScheduleKind::ring, ScheduleKind::all_gather})
      all.push_back({.ulysses = degree, .outer = outer});
  }
  return all;
}

}  // namespace

Definition hybrid() {
  return {.name = "hybrid",
          .help = "all_to_all in groups of ranks, ring or all_gather between the groups",
          .other_names = {"a2a+p2p", "usp"},
          .options = {"ulysses", "outer"},
          .describe = describe,
          .candidates = candidates,
          .composed = true,
          .tie_order = 4};
}

}  // namespace weft::schedule
