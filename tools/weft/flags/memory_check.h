// What does not fit the machine is refused before any of it is taken.
#pragma once

#include <string_view>

#include "check/cases/case.h"

namespace weft::tool {

// Error if `bytes` are more than this machine has, or than the process may have: it names both.
void check_memory(std::string_view what, double bytes);
// Queries, keys, values and output of a case, and with `gradients` theirs.
double tensor_bytes(const check::Case& c, const Problem& problem, bool gradients);

}  // namespace weft::tool
