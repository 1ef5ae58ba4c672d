#include "verify/pairwise.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <unordered_set>

#include "check/by_schedule.h"
#include "check/cases/random_case.h"
#include "index.h"

namespace weft::tool {
namespace {

// Numbers the values of all axes.
class Values {
 public:
  std::vector<std::uint64_t> of(const GridCell& cell) {
    std::vector<std::uint64_t> all{number("schedule", without_variants(cell.schedule))};
    for (const auto& [axis, value] : cell.labels) all.push_back(number(axis, value));
    return all;
  }

 private:
  std::uint64_t number(const std::string& axis, const std::string& value) {
    return numbers_.try_emplace({axis, value}, numbers_.size()).first->second;
  }
  std::map<std::pair<std::string, std::string>, std::uint64_t> numbers_;
};

using Pairs = std::vector<std::uint64_t>;

// Pairs of refused cells are distinct from pairs of cells that run.
Pairs pairs_of(const std::vector<std::uint64_t>& values, bool refused) {
  constexpr std::uint64_t kMany = 1U << 20;
  Pairs pairs;
  for (std::size_t i = 0; i < values.size(); ++i)
    for (std::size_t j = i + 1; j < values.size(); ++j)
      pairs.push_back((values[i] * kMany + values[j]) * 2 + (refused ? 1 : 0));
  return pairs;
}

bool is_refused(const GridCell& cell, const Problem& problem) {
  return refusal(check::use_of(cell.placed, check::layouts_of(cell.placed, problem), cell.schedule)).has_value();
}

}  // namespace

Grid pairwise(Grid grid) {
  struct Candidate {
    std::size_t problem, cell;
    Pairs pairs;
  };
  std::vector<Candidate> all;
  Values values;
  for (std::size_t p = 0; p < grid.problems.size(); ++p) {
    const Problem problem = check::problem_of(grid.problems[p].question);
    for (std::size_t c = 0; c < grid.problems[p].cells.size(); ++c) {
      const GridCell& cell = grid.problems[p].cells[c];
      all.push_back({p, c, pairs_of(values.of(cell), is_refused(cell, problem))});
    }
  }
  check::RandomChoices choices(1);  // in order, neighbours that are much alike would be kept
  for (std::size_t i = all.size(); i > 1; --i)
    std::swap(all[i - 1], all[at(choices.pick(0, static_cast<Index>(i) - 1))]);

  // Greedy: first cells that bring many new pairs, at last cells that bring one.
  std::vector<std::vector<bool>> kept;
  for (const GridProblem& problem : grid.problems) kept.emplace_back(problem.cells.size(), false);
  std::unordered_set<std::uint64_t> met;
  for (std::size_t least = all.empty() ? 0 : all.front().pairs.size(); least > 0; least /= 2) {
    for (const Candidate& c : all) {
      const auto unmet = [&](std::uint64_t pair) { return !met.contains(pair); };
      if (kept[c.problem][c.cell] ||
          std::count_if(c.pairs.begin(), c.pairs.end(), unmet) < static_cast<std::ptrdiff_t>(least))
        continue;
      kept[c.problem][c.cell] = true;
      met.insert(c.pairs.begin(), c.pairs.end());
    }
  }
  for (std::size_t p = 0; p < grid.problems.size(); ++p) {
    std::vector<GridCell> cells;
    for (std::size_t c = 0; c < kept[p].size(); ++c)
      if (kept[p][c]) cells.push_back(std::move(grid.problems[p].cells[c]));
    grid.problems[p].cells = std::move(cells);
  }
  std::erase_if(grid.problems, [](const GridProblem& problem) { return problem.cells.empty(); });
  return grid;
}

}  // namespace weft::tool
