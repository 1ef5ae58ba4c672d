#include "flags/auto_choice.h"

#include <algorithm>

#include <fmt/format.h>

#include "flags/machine_flag.h"
#include "flags/schedule_flags.h"
#include "terminal/numbers.h"
#include "weft/choose.h"
#include "weft/error.h"

namespace weft::tool {
namespace {

bool names_auto(const Flags& flags, std::string_view flag) {
  const std::string* given = flags.find(flag);
  if (given == nullptr) return false;
  const std::vector<std::string_view> parts = split(*given, ',');
  return std::find(parts.begin(), parts.end(), "auto") != parts.end();
}

}  // namespace

AutoProblem auto_problem(const Flags& flags, const Defaults& defaults) {
  const bool layout = flags.text("layout", "") == "auto";
  AutoProblem p{.given = case_of(layout ? flags.with("layout", "zigzag") : flags, defaults)};
  AskedSchedules asked;
  if (const std::string* given = flags.find("schedule")) asked = asked_schedules(flags, *given);
  p.schedules = asked.given;
  if (!layout && !asked.automatic) {
    flags.refuse({"machine"}, " and nothing to choose", "add --schedule auto or --layout auto, or leave it out");
    return p;
  }
  check::Case& c = p.given;
  if (!c.head_map.empty())
    throw Error("auto with --head-map", "name a schedule and a layout: what a map of heads takes is not predicted");
  const Layer layer{.problem = check::problem_of(c),
                    .heads_q = c.heads_q,
                    .heads_k = c.heads_k,
                    .shape = {.dtype = c.dtype, .dim_qk = c.dim_qk, .dim_v = c.dim_v}};
  const Machine machine = machine_of(flags, "cpu");
  ScheduleChoice chosen;
  if (layout) {
    ChooseOptions options;
    if (!asked.automatic)
      for (const ScheduleOptions& each : asked.given) options.schedules.push_back(fitted(each, c));
    if (c.format != check::Case::Format::thd) options.layouts = {LayoutKind::dual_chunk};  // the only one of batches
    const BatchChoice batch = choose({&layer, 1}, c.ranks, machine, options);
    c.layout = batch.layout;
    chosen = batch.layers[0];
    p.why = batch.why();
  } else {
    chosen = choose_schedule(layer, check::layouts_of(c, layer.problem), machine);
    p.why = chosen.why();
  }
  const auto same = [&](const ScheduleOptions& o) { return weft::words(o) == weft::words(chosen.schedule()); };
  if (asked.automatic && std::none_of(p.schedules.begin(), p.schedules.end(), same))
    p.schedules.push_back(chosen.schedule());
  p.why = fmt::format("auto, on {}: {}", machine.name, p.why);
  return p;
}

void refuse_auto(const Flags& flags, std::string_view by) {
  for (const char* flag : {"schedule", "layout"})
    if (names_auto(flags, flag))
      throw Error(fmt::format("--{} {} with {}", flag, *flags.find(flag), by),
                  fmt::format("name {}s or all of them: problems that are drawn are to meet every one", flag));
  flags.refuse({"machine"}, fmt::format(" with {}", by), "leave it out");
}

}  // namespace weft::tool
