// A case as users run it: each rank a thread, or a process, with its own rows, a schedule and an executor.
#pragma once

#include <string>

#include "check/oracle.h"
#include "weft/communicator.h"
#include "weft/schedule.h"
#include "weft/support.h"

namespace weft::check {

// How the ranks compute.
struct Way {
  ScheduleOptions schedule = {};
  std::string kernel = {};  // as for ExecutorOptions
  bool checked = false;     // as for ExecutorOptions; traffic() is then not compared, because checks send more
  // This process is a rank of it, and so are others that check the same; none: ranks are threads of this process.
  Communicator* world = nullptr;
};

std::string flags(const ScheduleOptions& options);  // "--schedule all_gather --key-order rank"

// The question to the capability table for this case.
Use use_of(const Case& c, const Layouts& layouts, const ScheduleOptions& options);

// The arithmetic that an executor's results are judged by.
Arithmetic executor_arithmetic(const Case& c);

// Forward and backward by the layout, ranks and format of `placed`, which otherwise is the oracle's case. Rows without
// token are NaN, and so are all outputs at first. Beside the numbers it looks at what is due to every rank: bytes and
// messages as traffic() says, rows without token as rows that see nothing, max_logit and dsink the same on all.
// Throws whatever the ranks throw.
AttendReport check_schedule(Oracle& oracle, const Case& placed, const Way& way);

// The same held against the capability table: what it refuses must be refused with its reason, and nothing else. One of
// the three is set.
struct Tried {
  std::optional<AttendReport> report = {};
  std::optional<Refusal> refused = {};  // as it should be
  std::optional<std::string> failure = {};
};
Tried try_schedule(Oracle& oracle, const Case& placed, const Way& way);

}  // namespace weft::check
