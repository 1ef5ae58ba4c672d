// The verbs of the command. Each returns its exit code: 0 right, 1 a check failed; bad input is thrown as Error.
#pragma once

#include <vector>

#include "flags/flags.h"

namespace weft::tool {

std::vector<FlagSpec> explain_flags();
int explain(const Flags& flags);

std::vector<FlagSpec> verify_flags();
int verify(const Flags& flags);

std::vector<FlagSpec> bench_flags();
int bench(const Flags& flags);

std::vector<FlagSpec> simulate_flags();
int simulate(const Flags& flags);

// The whole command, whose first argument is the verb.
int run(int argc, char** argv);
// The same with errors printed: the exit code of the process.
int command(int argc, char** argv);

}  // namespace weft::tool
