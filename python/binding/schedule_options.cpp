#include "schedule_options.h"

#include <algorithm>
#include <string>
#include <variant>
#include <vector>

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "convert.h"
#include "module.h"
#include "text.h"
#include "weft/error.h"

namespace weft::python {
namespace {

using namespace nb::literals;
using Kinds = std::vector<ScheduleKind>;

struct Option {
  std::string_view name;
  std::variant<Index ScheduleOptions::*, KeyOrder ScheduleOptions::*, ScheduleKind ScheduleOptions::*> field;
  Kinds owners;
  std::string_view help;
};

const std::vector<Option>& table() {
  using enum ScheduleKind;
  static const std::vector<Option> options = {
      {"key_order",
       &ScheduleOptions::key_order,
       {all_gather, hybrid},
       "order of gathered keys: auto, sequence or rank"},
      {"head_groups",
       &ScheduleOptions::head_groups,
       {all_gather, hybrid},
       "K/V heads are gathered in so many groups, each overlapped with the compute of the one before"},
      {"ulysses", &ScheduleOptions::inside, {hybrid}, "the Ulysses degree: so many ranks swap heads for sequence"},
      {"outer", &ScheduleOptions::across, {hybrid}, "the schedule between the Ulysses groups: ring or all_gather"},
      {"stages", &ScheduleOptions::stages, {exact}, "rows of other ranks come in so many steps"},
      {"ranks_per_step",
       &ScheduleOptions::abreast,
       {ring, hybrid},
       "keys of so many ranks (hybrid: Ulysses groups) come in a step"},
  };
  return options;
}

std::string listed(const Kinds& kinds, std::string_view between) {
  std::string out;
  for (const ScheduleKind kind : kinds) out += text(out.empty() ? "" : between, name(kind));
  return out;
}

const Option& option_called(std::string_view schedule, std::string_view said) {
  std::string all;
  for (const Option& option : table()) {
    if (option.name == said) return option;
    all += text(all.empty() ? "" : ", ", option.name, " (", listed(option.owners, ", "), ")");
  }
  throw Error(text("schedule ", schedule, " has no option '", said, "'"), text("options are ", all));
}

std::string name_given(const Option& option, nb::handle value) {
  std::string said;
  if (nb::try_cast<std::string>(value, said)) return said;
  throw Error(text(option.name, " is ", nb::repr(value).c_str()), text("give a name: ", option.help));
}

void set(ScheduleOptions& to, const Option& option, nb::handle value) {
  if (const auto* number = std::get_if<Index ScheduleOptions::*>(&option.field)) {
    to.** number = whole_number(value, option.name, "a whole number");
    return;
  }
  const std::string said = name_given(option, value);
  try {
    if (const auto* order = std::get_if<KeyOrder ScheduleOptions::*>(&option.field))
      to.** order = key_order(said);
    else
      to.*std::get<ScheduleKind ScheduleOptions::*>(option.field) = schedule_kind(said);
  } catch (const Error& e) {
    throw Error(text(option.name, ": ", e.problem()), e.remedy());
  }
}

nb::object get(const ScheduleOptions& from, const Option& option) {
  return std::visit(
      [&](auto field) -> nb::object {
        if constexpr (std::is_same_v<decltype(field), Index ScheduleOptions::*>)
          return nb::cast(from.*field);
        else
          return nb::cast(std::string(name(from.*field)));
      },
      option.field);
}

bool owns(const Option& option, ScheduleKind kind) {
  return std::find(option.owners.begin(), option.owners.end(), kind) != option.owners.end();
}

}  // namespace

ScheduleOptions schedule_options(std::string_view schedule, nb::dict given) {
  ScheduleOptions options{.kind = schedule_kind(schedule)};
  for (const auto& [key, value] : given) {
    const Option& option = option_called(schedule, nb::cast<std::string>(key));
    if (!owns(option, options.kind))
      throw Error(text(option.name, " = ", nb::repr(value).c_str(), " with schedule ", name(options.kind)),
                  text("leave it out: it is an option of ", listed(option.owners, " and ")));
    set(options, option, value);
  }
  return options;
}

nb::dict options_of(const ScheduleOptions& options) {
  nb::dict out;
  for (const Option& option : table())
    if (owns(option, options.kind)) out[nb::cast(std::string(option.name))] = get(options, option);
  return out;
}

void bind_schedule_options(nb::module_& m) {
  m.def(
      "check_schedule",
      [](std::string_view schedule, nb::dict given) {
        const ScheduleOptions options = schedule_options(schedule, given);
        const nb::dict all = options_of(options);
        nb::dict out;
        for (const auto& [key, value] : given) out[key] = all[key];
        return nb::make_tuple(std::string(name(options.kind)), out);
      },
      "schedule"_a, "options"_a,
      "Weft's own name of the schedule, and the given options as the library takes them; Error if it does not.");
  m.def(
      "schedule_options",
      [] {
        const ScheduleOptions usual;
        nb::list out;
        for (const Option& option : table())
          out.append(nb::make_tuple(std::string(option.name), listed(option.owners, ", "), get(usual, option),
                                    std::string(option.help)));
        return out;
      },
      "All options of schedules: (name, the schedules that have it, default, help).");
}

}  // namespace weft::python
