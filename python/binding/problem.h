// The question and who holds what, as Python sees them.
#pragma once

#include <optional>

#include "weft/layout.h"
#include "weft/mask.h"

namespace weft::python {

// Layouts of both sides, with what they were made for.
struct PlacedLayouts {
  Packing packing;
  Layouts layouts;
  std::optional<Mask> mask = {};  // that `balanced` goes by
};

}  // namespace weft::python
