// The table of options of all schedules.
#include <algorithm>
#include <charconv>

#include "index.h"
#include "schedule/description.h"
#include "text.h"

namespace weft {
namespace {

// `outer` stands first: which of the others a composed schedule uses depends on it.
constexpr ScheduleOption kOptions[] = {
    {.name = "outer", .help = "schedule that brings the keys of the other groups", .schedule = &ScheduleOptions::outer},
    {.name = "ulysses",
     .help = "Ulysses degree: so many consecutive ranks swap heads for sequence",
     .whole = &ScheduleOptions::ulysses},
    {.name = "key_order",
     .help = "order of gathered keys; auto is sequence where the layout's stride is 1",
     .order = &ScheduleOptions::key_order},
    {.name = "head_groups",
     .help = "heads are gathered, sent or swapped in so many groups, each while the one before is attended",
     .whole = &ScheduleOptions::head_groups},
    {.name = "stages",
     .help = "rows of other ranks come in so many steps, each while the one before is attended; one with head_groups",
     .whole = &ScheduleOptions::stages},
    {.name = "ranks_per_step",
     .help = "a step brings the keys of so many ranks (hybrid, mesh: groups), with node those of one node; more are "
             "fewer steps "
             "and larger buffers",
     .whole = &ScheduleOptions::ranks_per_step},
    {.name = "node",
     .help = "so many consecutive ranks share fast links: a row enters such a node once and is passed on inside it",
     .whole = &ScheduleOptions::node},
    {.name = "query_ranks",
     .help =
         "so many consecutive ranks attend each other's queries, each against its share of the keys; 0: the side of "
         "the mesh with the fewest bytes",
     .whole = &ScheduleOptions::query_ranks,
     .least = 0}};

constexpr std::string_view kOrders[] = {"auto", "sequence", "rank"};  // by KeyOrder

std::string list(std::span<const std::string_view> names) {
  std::string out;
  for (const std::string_view each : names) out += text(out.empty() ? "" : ", ", each);
  return out;
}

bool has(const schedule::Definition& d, std::string_view option) {
  return std::find(d.options.begin(), d.options.end(), option) != d.options.end();
}

}  // namespace

std::string_view name(KeyOrder order) { return kOrders[static_cast<std::size_t>(order)]; }

KeyOrder key_order(std::string_view name) {
  const auto found = std::find(std::begin(kOrders), std::end(kOrders), name);
  if (found == std::end(kOrders))
    throw Error(text("there is no key order '", name, "'"), text("use one of ", list(kOrders)));
  return static_cast<KeyOrder>(found - std::begin(kOrders));
}

std::string ScheduleOption::value(const ScheduleOptions& o) const {
  if (order != nullptr) return std::string(weft::name(o.*order));
  if (schedule != nullptr) return std::string(weft::name(o.*schedule));
  return std::to_string(o.*whole);
}

Index ScheduleOption::number(const ScheduleOptions& o) const {
  return whole != nullptr
             ? o.*whole
             : static_cast<Index>(order != nullptr ? static_cast<int>(o.*order) : static_cast<int>(o.*schedule));
}

void ScheduleOption::set(ScheduleOptions& o, std::string_view value) const {
  if (order != nullptr) {
    o.*order = key_order(value);
  } else if (schedule != nullptr) {
    o.*schedule = schedule_kind(value);
  } else {
    Index number = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error != std::errc() || end != value.data() + value.size())
      throw Error(text(name, " is '", value, "'"), "give a whole number");
    o.*whole = number;
  }
  check_options(o);
}

std::vector<std::string_view> ScheduleOption::names() const {
  if (order != nullptr) return {std::begin(kOrders), std::end(kOrders)};
  std::vector<std::string_view> all;
  for (const schedule::Definition& d : schedule::registry())
    if (schedule != nullptr && d.outer) all.push_back(d.name);
  return all;
}

std::span<const ScheduleOption> schedule_options() { return kOptions; }

const ScheduleOption& schedule_option(std::string_view name) {
  std::vector<std::string_view> names;
  for (const ScheduleOption& option : kOptions) {
    if (option.name == name) return option;
    names.push_back(option.name);
  }
  throw Error(text("schedules have no option '", name, "'"), text("use ", list(names)));
}

bool uses(const ScheduleOptions& o, std::string_view option) {
  const schedule::Definition& d = schedule::definition(o.kind);
  return has(d, option) || (d.composed && has(schedule::definition(o.outer), option));
}

bool uses(ScheduleKind kind, std::string_view option) {
  const schedule::Definition& d = schedule::definition(kind);
  const auto of_outer = [&](const schedule::Definition& each) { return each.outer && has(each, option); };
  return has(d, option) ||
         (d.composed && std::any_of(schedule::registry().begin(), schedule::registry().end(), of_outer));
}

void check_options(const ScheduleOptions& o) {
  for (const ScheduleOption& option : kOptions) {
    if (option.whole == nullptr) continue;
    const std::string problem = text("schedule option ", option.name, " = ", o.*option.whole);
    if (o.*option.whole < option.least) throw Error(problem, text("use at least ", option.least));
    if (o.*option.whole > kMaxTokens) throw Error(problem, text("use at most ", kMaxTokens));
  }
  const std::vector<std::string_view> outers = schedule_option("outer").names();
  if (std::find(outers.begin(), outers.end(), name(o.outer)) == outers.end())
    throw Error(text("schedule option outer = ", name(o.outer)), text("use one of ", list(outers)));
}

std::string words(const ScheduleOptions& o) {
  std::string out(name(o.kind));
  for (const ScheduleOption& option : kOptions)
    if (uses(o, option.name) && !option.is_default(o)) out += text(" ", option.name, "=", option.value(o));
  return out;
}

}  // namespace weft
