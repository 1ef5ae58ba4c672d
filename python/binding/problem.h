// The question and who holds what, as Python sees them.
#pragma once

#include <optional>
#include <string_view>

#include "weft/layout.h"
#include "weft/mask.h"
#include "weft/schedule.h"

namespace weft::python {

// Layouts of both sides, with what they were made for.
struct PlacedLayouts {
  Packing packing;
  Layouts layouts;
  std::optional<Mask> mask = {};  // that `balanced` goes by
};

ScheduleOptions options_of(std::string_view kind, std::string_view key_order_name, Index head_groups, Index inside,
                           std::string_view across, Index stages, Index abreast);

}  // namespace weft::python
