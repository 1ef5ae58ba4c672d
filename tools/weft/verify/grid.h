// Many cases by many schedules, each question answered once: what `verify --matrix` and `verify --set` run.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "check/by_schedule.h"
#include "check/cases/case.h"
#include "terminal/progress.h"

namespace weft::tool {

// "layout": "zigzag". What a cell is, said by name; tables count by these.
using Labels = std::vector<std::pair<std::string, std::string>>;
const std::string& label(const Labels& labels, std::string_view axis);

// The value of an axis that a cell does not have.
inline constexpr std::string_view kHasNone = "-";

// One run: the problem's question, spread over ranks, by a schedule.
struct GridCell {
  check::Case placed;
  ScheduleOptions schedule = {};
  Labels labels = {};
};

// In variants that take turns: head_groups, ulysses, stages, ranks_per_step. `turn` counts placements.
ScheduleOptions by_turn(ScheduleOptions options, const check::Case& placed, Index turn);
Labels variant_labels(const ScheduleOptions& options);
// The schedule in words without its numbers, which are axes of their own.
std::string without_variants(ScheduleOptions options);

// One question. Its answer is computed once, for all cells.
struct GridProblem {
  check::Case question;            // layout, ranks and format play no part
  std::optional<Index> rows = {};  // compare so many query rows; none: all
  std::vector<GridCell> cells = {};
};

struct Grid {
  std::string title;
  std::vector<std::string> row_axes;    // of the large table: a line for each combination
  std::vector<std::string> other_axes;  // a line for each value
  std::vector<GridProblem> problems = {};

  Index cells() const;
};

struct GridRun {
  Index threads = 1;
  std::string kernel = {};
  bool checked = false;           // executors are
  Communicator* world = nullptr;  // of processes, of which this is one; none: ranks are threads
  TimeLimit limit = {};
  std::function<void(Index done, Index failed)> progress = {};
};

// What became of each cell, in the order of the grid whatever thread took it; nothing of those that the time limit left
// out.
std::vector<check::Tried> run_grid(const Grid& grid, const GridRun& how);

bool left_out(const check::Tried& tried);
// Why a cell failed, in one line; none if it did not.
std::optional<std::string> failure_of(const check::Tried& tried);
std::string command_of(const GridCell& cell, const GridRun& how);

}  // namespace weft::tool
