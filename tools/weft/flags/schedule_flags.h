// Flags that say which schedules run, with which options, and over which communicator.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "check/cases/case.h"
#include "flags/flags.h"
#include "weft/schedule.h"

namespace weft::tool {

std::vector<FlagSpec> schedule_flags();
// These flags, then those that are made from the table of options, and --mesh.
std::vector<FlagSpec> with_schedule_options(std::vector<FlagSpec> flags);
std::vector<std::string> schedule_option_names(std::vector<std::string> more = {});  // of the latter

inline const FlagSpec kHeadMapFlag = {"head-map", "LIST", "0,1,1: the K/V head of each query head"};

// A thread each: more than this says nothing new.
inline constexpr Index kMaxThreadRanks = 256;
void check_thread_ranks(Index ranks);

// Every schedule of the list "a,b" with the options that the flags say. Options that have names, and no flag, take
// their default, or one after another every name if every variant is wanted. Other names than a schedule's own are
// explained on stderr.
std::vector<ScheduleOptions> schedules_of(const Flags& flags, std::string_view schedules, bool every_variant = false);
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
// With no more groups of heads than there are heads, and a Ulysses degree that divides the ranks.
ScheduleOptions fitted(ScheduleOptions options, const check::Case& c);
// Error for a communicator that this build does not have.
std::string communicator_of(const Flags& flags);
check::Case::Format format_of(const Flags& flags);

// "a,b,c", or "all". Error for an empty part, or a name that comes twice.
std::vector<std::string> list_of(std::string_view flag, const std::string& text, const std::vector<std::string>& all);

}  // namespace weft::tool
