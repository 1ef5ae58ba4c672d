// --machine: a preset's name, or a machine file.
#pragma once

#include "flags/flags.h"
#include "weft/cost.h"

namespace weft::tool {

Machine machine_of(const Flags& flags, std::string_view otherwise);
// Error that names the file.
Machine read_machine(const std::string& path);

}  // namespace weft::tool
