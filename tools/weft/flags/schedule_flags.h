// Flags that say which schedules run, and by what.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "check/cases/case.h"
#include "flags/flags.h"
#include "weft/schedule.h"

namespace weft::tool {

const std::vector<FlagSpec>& schedule_flags();

// A thread each: more than this says nothing new.
inline constexpr Index kMaxThreadRanks = 256;

// What is run of each schedule where no flag says otherwise.
struct Variants {
  std::vector<KeyOrder> orders = {KeyOrder::automatic};
  std::vector<ScheduleKind> across = {ScheduleKind::ring};
};
inline const Variants kAllVariants = {{KeyOrder::sequence, KeyOrder::rank},
                                      {ScheduleKind::ring, ScheduleKind::all_gather}};

// Every schedule of the list "a,b", in every variant that it has.
std::vector<ScheduleOptions> schedules_of(const Flags& flags, std::string_view schedules, const Variants& otherwise);
// The same where `auto` may stand in the list.
struct AskedSchedules {
  std::vector<ScheduleOptions> given;
  bool automatic = false;  // one more, to be chosen
};
AskedSchedules asked_schedules(const Flags& flags, std::string_view schedules);
// Takes out of `schedules` those that this problem cannot be cut for, each with its reason: `--schedule all` means
// those that can. Error instead if the user named schedules, or options of theirs, or if nothing is left.
std::vector<std::string> leave_out_impossible(const Flags& flags, const check::Case& c, const Problem& problem,
                                              const Layouts& layouts, std::vector<ScheduleOptions>& schedules);
// With no more groups of heads than there are heads, and a mesh that divides the ranks.
ScheduleOptions fitted(ScheduleOptions options, const check::Case& c);
// Error for a communicator that this build does not have.
std::string communicator_of(const Flags& flags);
check::Case::Format format_of(const Flags& flags);

// "a,b,c", or "all". Error for an empty part, or a name that comes twice.
std::vector<std::string> list_of(std::string_view flag, const std::string& text, const std::vector<std::string>& all);

}  // namespace weft::tool
