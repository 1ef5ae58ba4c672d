// weft verify --accuracy: kernels on inputs that are hard on arithmetic, against the documented bounds.
#pragma once

#include "flags/flags.h"

namespace weft::tool {

int verify_accuracy(const Flags& flags);

}  // namespace weft::tool
