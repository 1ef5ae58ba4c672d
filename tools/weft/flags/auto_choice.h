// --schedule auto and --layout auto: what weft::choose answers for a problem from flags.
#pragma once

#include <string>
#include <vector>

#include "check/cases/case.h"
#include "flags/flags.h"
#include "weft/schedule.h"

namespace weft::tool {

struct AutoProblem {
  check::Case given;                            // with its layout
  std::vector<ScheduleOptions> schedules = {};  // as asked, the chosen one last
  std::string why = {};                         // empty: nothing was to be chosen
};
// Predicted for --machine, or for ranks that are threads. Error where nothing can be chosen.
AutoProblem auto_problem(const Flags& flags, const Defaults& defaults);
// Error if either is asked for: problems that `by` draws name what they want.
void refuse_auto(const Flags& flags, std::string_view by);

inline const FlagSpec kMachineFlag = {"machine", "NAME",
                                      "with auto: a preset (cpu if not given) or a machine file to predict for"};

}  // namespace weft::tool
