// --machine: a preset's name, or a machine file.
#pragma once

#include "flags/flags.h"
#include "weft/cost.h"

namespace weft::tool {

Machine machine_of(const Flags& flags, std::string_view otherwise);  // errors name the file

}  // namespace weft::tool
