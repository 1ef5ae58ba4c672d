#include <algorithm>
#include <cstdio>
#include <functional>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "flags/process_ranks.h"
#include "flags/schedule_flags.h"
#include "terminal/json_file.h"
#include "terminal/numbers.h"
#include "verify/grid_table.h"
#include "verify/grids.h"
#include "verify/modes.h"
#include "verify/pairwise.h"
#include "weft/error.h"
#include "weft/kernel.h"

namespace weft::tool {
namespace {

// Grids bring their own problems: only what restricts them may be given.
void exclude_problems(const Flags& flags, std::string_view grid, const std::vector<std::string_view>& taken) {
  std::vector<std::string> others = problem_flags(schedule_option_names({"random", "format", "head-map", "layout"}));
  others.emplace_back(grid == "set" ? "matrix" : "set");
  for (const std::string_view name : taken) std::erase(others, name);
  flags.exclude(grid, others,
                fmt::format("it brings its own problems; use --{} to choose among them", fmt::join(taken, ", --")));
}

std::vector<Index> ranks_of(const Flags& flags, std::string_view otherwise) {
  if (const Communicator* world = process_world()) {
    if (flags.whole("ranks", world->ranks(), "4") != world->ranks())
      throw Error(fmt::format("--ranks {} with {} ranks of {}", *flags.find("ranks"), world->ranks(), world->name()),
                  "leave --ranks out, or start as many");
    return {world->ranks()};
  }
  const std::vector<Index> ranks = whole_numbers("--ranks", flags.text("ranks", otherwise), "2,3,4,8");
  std::for_each(ranks.begin(), ranks.end(), check_thread_ranks);
  return ranks;
}

std::vector<DType> dtypes_of(const Flags& flags) {
  std::vector<DType> dtypes;
  const std::vector<std::string> all = {"f32", "bf16", "f16"};
  for (const std::string& name : list_of("--dtype", flags.text("dtype", "all"), all)) dtypes.push_back(dtype(name));
  return dtypes;
}

std::vector<LayoutKind> layouts_of(const Flags& flags) {
  std::vector<LayoutKind> layouts;
  const std::vector<std::string> all = {"contiguous", "dual_chunk", "zigzag",  "striped",
                                        "balanced",   "placed",     "explicit"};
  for (const std::string& name : list_of("--layout", flags.text("layout", "all"), all))
    layouts.push_back(layout_kind(name));
  return layouts;
}

GridAxes axes_of(const Flags& flags, std::string_view ranks) {
  return {.schedules = schedules_of(flags, flags.text("schedule", "all"), true),
          .ranks = ranks_of(flags, ranks),
          .dtypes = dtypes_of(flags),
          .seed = seed_of(flags)};
}

int verify_grid(const Flags& flags, Grid grid) {
  Communicator* world = process_world();
  const Index threads = world != nullptr ? 1 : threads_of(flags);
  const std::string kernel = flags.given("kernel") ? std::string(find_kernel(*flags.find("kernel")).name) : "";
  const std::string communicator = communicator_of(flags);
  const TimeLimit limit = time_limit_of(flags);
  if (limit.given() && world != nullptr)
    throw Error(fmt::format("--time-limit {} with --comm {}", limit.seconds(), communicator),
                "use --pairwise: processes would not stop at the same run");
  const Index all = grid.cells();
  if (flags.given("pairwise")) grid = pairwise(std::move(grid));
  JsonOutput output(world != nullptr && world->rank() > 0 ? nullptr : flags.find("json"));
  fmt::print("{}: {} runs of {} problems, kernel {}, communicator {}.\n", grid.title, grouped(grid.cells()),
             grouped(static_cast<Index>(grid.problems.size())), kernel.empty() ? "auto" : kernel, communicator);
  if (flags.given("pairwise"))
    fmt::print("Of {} runs those {} in which any two values of any two axes meet, {} are left out: --pairwise.\n",
               grouped(all), grouped(grid.cells()), grouped(all - grid.cells()));
  const auto sampled = std::find_if(grid.problems.begin(), grid.problems.end(), [](const auto& p) { return p.rows; });
  fmt::print("Forward and backward of each against a dense softmax in f64{}{}.\n\n",
             sampled == grid.problems.end()
                 ? std::string()
                 : fmt::format(", in {} query rows and what they add to all keys (too large to be compared whole, and "
                               "max_logit is not)",
                               *sampled->rows),
             flags.given("checked") ? "; executors are checked" : "; bytes and messages against traffic()");
  std::fflush(stdout);
  GridRun how{.threads = threads, .kernel = kernel, .checked = flags.given("checked"), .world = world, .limit = limit};
  std::vector<check::Tried> outcomes;
  {
    Progress progress(grid.cells(), "runs");
    if (world == nullptr || world->rank() == 0)
      how.progress = [&](Index done, Index failed) { progress.show(done, failed); };
    outcomes = run_grid(grid, how);
    how.progress = {};
  }
  const GridTable table(grid, outcomes, how);
  table.print();
  output.write(table.to_json());
  if (table.failed() == 0 && table.ok() == 0)
    fmt::print(stderr, "weft: {}, so nothing was checked; ask for what can run (weft explain --support)\n",
               table.left_out() > 0 ? "the time was over before the first run" : "all was refused");
  if (table.failed() > 0 || (table.ok() == 0 && table.left_out() > 0)) return kFailed;
  return table.ok() == 0 ? kNothingRan : 0;
}

}  // namespace

int verify_matrix(const Flags& flags) {
  const bool full = flags.one_of("matrix", {"quick", "full"}) == "full";
  exclude_problems(flags, "matrix", {"layout", "ranks", "dtype", "schedule", "key-order", "outer", "seed"});
  return verify_grid(flags, matrix_grid(axes_of(flags, "2,3,4,8"), layouts_of(flags), full));
}

int verify_set(const Flags& flags) {
  constexpr Index kSmall = 32;
  flags.one_of("set", {"te-grid"});
  exclude_problems(flags, "set", {"scale", "ranks", "dtype", "schedule", "key-order", "outer", "seed"});
  const Index scale = flags.within("scale", kSmall, 1, kSmall, " (the smallest)");
  return verify_grid(flags, te_grid(axes_of(flags, "2,4"), scale));
}

}  // namespace weft::tool
