#include "verify/grid.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>

#include <fmt/format.h>

#include "check/cases/random_case.h"
#include "index.h"
#include "verify/on_threads.h"
#include "verify/tally.h"

namespace weft::tool {
namespace {

// Runs all cells of a problem; `put` takes each outcome.
template <class Put>
void run_problem(const GridProblem& problem, const GridRun& how, Put&& put) {
  check::Oracle oracle(problem.question, check::executor_arithmetic(problem.question), problem.rows);
  for (std::size_t i = 0; i < problem.cells.size() && !how.limit.over(); ++i) {
    const GridCell& cell = problem.cells[i];
    put(i, try_schedule(oracle, cell.placed, {cell.schedule, how.kernel, how.checked, how.world}));
  }
}

// The query heads of a group must be neighbours, unless they are swapped.
bool can_group(const check::Case& c, const ScheduleOptions& options) {
  if (options.kind == ScheduleKind::all_to_all) return c.heads_q > 1;
  return c.heads_k > 1 && std::is_sorted(c.head_map.begin(), c.head_map.end());
}

// Neighbours of the grid are much alike, so with a time limit (`spread`) problems are taken in a random order.
std::vector<std::size_t> order_of(std::size_t problems, bool spread) {
  std::vector<std::size_t> order(problems);
  std::iota(order.begin(), order.end(), std::size_t{0});
  check::RandomChoices choices(1);
  for (std::size_t i = problems; spread && i > 1; --i)
    std::swap(order[i - 1], order[at(choices.pick(0, static_cast<Index>(i) - 1))]);
  return order;
}

}  // namespace

const std::string& label(const Labels& labels, std::string_view axis) {
  static const std::string none;
  const auto found = std::find_if(labels.begin(), labels.end(), [&](const auto& l) { return l.first == axis; });
  return found == labels.end() ? none : found->second;
}

ScheduleOptions by_turn(ScheduleOptions options, const check::Case& placed, Index turn) {
  check::RandomChoices choices(
      static_cast<unsigned long long>(turn));  // taking turns would correlate with ranks and layouts
  const bool two_groups = choices.one_in(2);
  const Index stages = choices.pick(1, 3), mesh = choices.pick(0, 99), ranks_per_step = choices.pick(1, 3);
  if (uses(options, "head_groups") && can_group(placed, options) && two_groups) options.head_groups = 2;
  if (uses(options, "stages")) options.stages = stages;
  if (uses(options, "ranks_per_step")) options.ranks_per_step = ranks_per_step;
  std::vector<Index> degrees;  // 1 and all ranks are hardly hybrids or nodes, but must work
  for (Index degree = 1; degree <= placed.ranks; ++degree)
    if (placed.ranks % degree == 0) degrees.push_back(degree);
  if (uses(options, "query_ranks")) options.query_ranks = degrees[static_cast<std::size_t>(mesh) % degrees.size()];
  if (uses(options, "ulysses")) options.ulysses = degrees[static_cast<std::size_t>(mesh) % degrees.size()];
  if (!uses(options, "node")) return options;
  const Index group = uses(options, "ulysses") ? options.ulysses : 1;
  std::erase_if(degrees, [&](Index degree) { return degree % group != 0 && group % degree != 0; });
  options.node = degrees[static_cast<std::size_t>(choices.pick(0, 99)) % degrees.size()];
  return options;
}

Labels variant_labels(const ScheduleOptions& options) {
  Labels labels;
  for (const ScheduleOption& option : schedule_options())
    if (option.whole != nullptr)
      labels.emplace_back(option.name, uses(options, option.name) ? option.value(options) : std::string(kHasNone));
  return labels;
}

std::string without_variants(ScheduleOptions options) {
  for (const ScheduleOption& option : schedule_options())
    if (option.whole != nullptr) options.*option.whole = ScheduleOptions{}.*option.whole;
  return weft::words(options);
}

Index Grid::cells() const {
  Index n = 0;
  for (const GridProblem& problem : problems) n += static_cast<Index>(problem.cells.size());
  return n;
}

std::vector<check::Tried> run_grid(const Grid& grid, const GridRun& how) {
  std::vector<std::size_t> first;
  for (std::size_t cells = 0; const GridProblem& problem : grid.problems) {
    first.push_back(cells);
    cells += problem.cells.size();
  }
  std::vector<check::Tried> outcomes(at(grid.cells()));
  const std::vector<std::size_t> order = order_of(grid.problems.size(), how.limit.given());
  std::atomic<std::size_t> next = 0;
  std::mutex mutex;
  Index done = 0, failed = 0;
  on_threads(how.threads, [&] {
    for (std::size_t n; (n = next++) < order.size() && !how.limit.over();) {
      const std::size_t p = order[n];
      run_problem(grid.problems[p], how, [&](std::size_t cell, check::Tried tried) {
        const std::lock_guard lock(mutex);
        if (failure_of(tried)) ++failed;
        outcomes[first[p] + cell] = std::move(tried);
        if (how.progress) how.progress(++done, failed);
      });
    }
  });
  return outcomes;
}

bool left_out(const check::Tried& tried) { return !tried.report && !tried.refused && !tried.failure; }

std::optional<std::string> failure_of(const check::Tried& tried) {
  return tried.failure || !tried.report ? tried.failure : failure_of(*tried.report);
}

std::string command_of(const GridCell& cell, const GridRun& how) {
  return command_of(cell.placed, {.kernel = how.kernel, .schedules = {cell.schedule}, .checked = how.checked},
                    check::flags(cell.schedule));
}

}  // namespace weft::tool
