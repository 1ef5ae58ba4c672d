// A mesh of a x b ranks: a neighbouring ranks attend each other's queries, each against the keys of the b ranks at its
// own place in such groups, so that every query meets every key on one rank. Queries and partial results move among a
// ranks, keys among b, where a ring moves keys among all. It pays where query heads are few for each K/V head.
#include <algorithm>

#include "schedule/description.h"
#include "text.h"

namespace weft::schedule {
namespace {

// K or V of a rank that one gets and sends in a forward with 16 bits a number: queries there, f32 sums back.
double volume(Index a, const Shape& shape) {
  const double queries = static_cast<double>(shape.heads_q) / static_cast<double>(shape.heads_k);
  return 3 * queries * static_cast<double>(a - 1) + 2 * static_cast<double>(shape.ranks / a - 1);
}

// Sides of a mesh of at least two ranks, the one of the lowest volume first.
std::vector<Index> sides(const Shape& shape) {
  std::vector<Index> all;
  for (Index a = 2; a <= shape.ranks; ++a)
    if (shape.ranks % a == 0) all.push_back(a);
  std::sort(all.begin(), all.end(), [&](Index a, Index b) { return volume(a, shape) < volume(b, shape); });
  return all;
}

Index side_of(const ScheduleOptions& o, const Shape& shape) {
  if (o.query_ranks == 0) return shape.ranks == 1 ? 1 : sides(shape).front();
  if (shape.ranks % o.query_ranks != 0)
    throw Error(text("query_ranks = ", o.query_ranks, " do not divide ", shape.ranks, " ranks"),
                "use a side of the mesh that divides them, or 0 for the one with the fewest bytes");
  return o.query_ranks;
}

// The own queries meet the own keys first, and then the first keys that come: meanwhile queries of the others arrive.
// The last keys are met by the others' queries first, a rank's after the other, so that their partial results are on
// the way home while the rest is computed; the own queries come last.
Description describe(const ScheduleOptions& o, const Shape& shape) {
  const Index a = side_of(o, shape), b = shape.ranks / a;
  const Range own{0, 1}, others{1, a};
  Description d{.query_ranks = a, .steps = {{}}};
  std::vector<Range> met;  // distances of each step that moves keys
  for (Index first = 1; first < b; first += o.ranks_per_step)
    met.push_back({first, min_of(first + o.ranks_per_step, b)});
  // Adds a step about keys of some groups, which come with the first such step.
  const auto add = [&](Range distances, Range queries) {
    const bool moves = distances.begin > 0 && d.steps.back().distances != distances;
    d.steps.push_back({.distances = distances, .again = distances.begin > 0 && !moves, .queries = queries});
    if (moves) d.steps.back().move = Move::Kind::gather;
  };
  const auto add_in_parts = [&](Range distances) {
    for (Index part = 1; part < a; ++part) add(distances, {part, part + 1});
  };
  if (met.empty()) {
    add_in_parts(own);
    return d;
  }
  if (met.size() == 1 && a > 1) add({0, 1}, others);
  for (std::size_t n = 0; n + 1 < met.size(); ++n) {
    add(met[n], own);
    if (a == 1) continue;
    add(met[n], others);
    if (n == 0) add({0, 1}, others);
  }
  add_in_parts(met.back());
  add(met.back(), own);
  return d;
}

std::vector<ScheduleOptions> candidates(const Shape& shape, std::span<const Index>) {
  constexpr std::size_t kMost = 3;  // sides
  std::vector<ScheduleOptions> all;
  std::vector<Index> fewest = sides(shape);
  if (fewest.size() > kMost) fewest.resize(kMost);
  for (const Index a : fewest) {
    if (volume(a, shape) >= volume(1, shape)) break;  // than a ring
    all.push_back({.query_ranks = a});
    if (shape.ranks / a > 4) all.push_back({.ranks_per_step = 4, .query_ranks = a});  // fewer, longer messages
  }
  return all;
}

}  // namespace

Definition mesh() {
  return {.name = "mesh",
          .help = "queries move among some ranks, K and V among the others (Mesh-Attention)",
          .options = {"query_ranks", "ranks_per_step"},
          .describe = describe,
          .candidates = candidates,
          .by_lengths = "whose steps attend other ranks' queries",
          .tie_order = 5};
}

}  // namespace weft::schedule
