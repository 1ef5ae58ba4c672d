// Checks and capacities of steps on a device.
#pragma once

#include "weft/device_rows.h"

namespace weft {

// A step of either kind; a ring's has more rules.
void check_gather_args(const DeviceStepArgs& args);
void check_ring_args(const DeviceStepArgs& args);

}  // namespace weft
