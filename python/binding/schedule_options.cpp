#include "schedule_options.h"

#include <string>

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "convert.h"
#include "module.h"
#include "text.h"
#include "weft/error.h"

namespace weft::python {
namespace {

using namespace nb::literals;

std::string owners(const ScheduleOption& option, std::string_view between) {
  std::string out;
  for (const ScheduleKind kind : schedule_kinds())
    if (uses(kind, option.name)) out += text(out.empty() ? "" : between, name(kind));
  return out;
}

const ScheduleOption& option_called(std::string_view schedule, std::string_view said) {
  std::string all;
  for (const ScheduleOption& option : weft::schedule_options()) {
    if (option.name == said) return option;
    all += text(all.empty() ? "" : ", ", option.name, " (", owners(option, ", "), ")");
  }
  throw Error(text("schedule ", schedule, " has no option '", said, "'"), text("options are ", all));
}

void set(ScheduleOptions& to, const ScheduleOption& option, nb::handle value) {
  if (option.whole != nullptr) {
    to.*option.whole = whole_number(value, option.name, "a whole number");
    return;
  }
  std::string said;
  if (!nb::try_cast<std::string>(value, said))
    throw Error(text(option.name, " is ", nb::repr(value).c_str()), text("give a name: ", option.help));
  try {
    option.set(to, said);
  } catch (const Error& e) {
    throw Error(text(option.name, ": ", e.problem()), e.remedy());
  }
}

nb::object get(const ScheduleOptions& from, const ScheduleOption& option) {
  return option.whole != nullptr ? nb::cast(from.*option.whole) : nb::cast(option.value(from));
}

}  // namespace

ScheduleOptions schedule_options(std::string_view schedule, nb::dict given) {
  ScheduleOptions options{.kind = schedule_kind(schedule)};
  for (const auto& [key, value] : given) {
    const ScheduleOption& option = option_called(schedule, nb::cast<std::string>(key));
    if (!uses(options.kind, option.name))
      throw Error(text(option.name, " = ", nb::repr(value).c_str(), " with schedule ", name(options.kind)),
                  text("leave it out: it is an option of ", owners(option, " and ")));
    set(options, option, value);
  }
  return options;
}

nb::dict options_of(const ScheduleOptions& options) {
  nb::dict out;
  for (const ScheduleOption& option : weft::schedule_options())
    if (uses(options.kind, option.name)) out[nb::cast(std::string(option.name))] = get(options, option);
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
        nb::list out;
        for (const ScheduleOption& option : weft::schedule_options())
          out.append(nb::make_tuple(std::string(option.name), owners(option, ", "), get({}, option),
                                    std::string(option.help)));
        return out;
      },
      "All options of schedules: (name, the schedules that have it, default, help).");
}

}  // namespace weft::python
