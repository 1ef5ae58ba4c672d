// A case in micro-sequences: each rank a thread with a K/V buffer, as a model goes through its layers.
#pragma once

#include <string>

#include "check/oracle.h"

namespace weft::check {

// How the micro-sequences go.
struct MicroWay {
  Index micros = 1;
  std::string kernel = {};  // as for KvBufferOptions
  bool checked = false;     // as for KvBufferOptions
  bool even_work = false;   // MicroSplit::even_work, with the mask of the case
  bool ahead = false;       // the next keys come while one micro-sequence is computed
  // Rows that no later query sees are dropped, and before its backward each micro-sequence is attended again.
  bool recomputed = false;
};

// Why the case cannot go in so many micro-sequences; none if it can.
std::optional<std::string> micro_refusal(const Case& c, const Problem& problem, const MicroWay& way);

// A random case as it can: keys where the queries are, and none that comes later than its query.
Case in_micro_sequences(Case c);

// Forward and backward of all micro-sequences on all ranks. Rows without token are NaN, and so are all outputs at
// first. Throws whatever the ranks throw.
AttendReport check_micro(Oracle& oracle, const MicroWay& way);

}  // namespace weft::check
