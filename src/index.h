// An Index as a subscript of the standard library's containers.
#pragma once

#include <cstddef>

#include "weft/config.h"

namespace weft {

constexpr std::size_t at(Index i) { return static_cast<std::size_t>(i); }

}  // namespace weft
