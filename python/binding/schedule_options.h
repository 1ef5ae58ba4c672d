// What weft.Schedule(name, option=value, ...) means: the one place where Python's names of options become
// ScheduleOptions.
#pragma once

#include <string_view>

#include <nanobind/nanobind.h>

#include "weft/schedule.h"

namespace weft::python {

// Options that are not given keep their defaults. Error for an option that the schedule does not own, and for a value
// of the wrong kind.
ScheduleOptions schedule_options(std::string_view schedule, nanobind::dict given);

// The inverse: the options that the schedule owns, by name.
nanobind::dict options_of(const ScheduleOptions& options);

}  // namespace weft::python
