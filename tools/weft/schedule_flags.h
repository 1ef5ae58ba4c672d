// Flags that say which schedules run, and by what.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "check/case.h"
#include "flags.h"
#include "weft/schedule.h"

namespace weft::tool {

const std::vector<FlagSpec>& schedule_flags();

// A thread each: more than this says nothing new.
inline constexpr Index kMaxThreadRanks = 256;

// Every schedule asked for, in every key order asked for where it has one; none without --schedule. `otherwise`: key
// orders if none are given.
std::vector<ScheduleOptions> schedules_of(const Flags& flags, std::string_view schedules,
                                          const std::vector<KeyOrder>& otherwise);
// Error for a communicator that this build does not have.
std::string communicator_of(const Flags& flags);
check::Case::Format format_of(const Flags& flags);

// "a,b,c", or "all". Error for an empty part, or a name that comes twice.
std::vector<std::string> list_of(std::string_view flag, const std::string& text, const std::vector<std::string>& all);

}  // namespace weft::tool
