// Device contexts that calls without one of their own share: one for each stream, made when it is first used.
#pragma once

#include <functional>

#include "weft/device_plan.h"

namespace weft {

// Calls `work` with the context of the place's stream; no other thread uses it meanwhile. While a graph is captured
// nothing can be allocated: a stream that is new then takes a context that was set aside by an earlier call on the same
// GPU, and without one it is an Error that says to make such a call first. Faults are thrown by check_shared_contexts
// alone.
void with_shared_context(const Place& place, const std::function<void(DeviceContext&)>& work);
// Throws a fault that completed work has reported to any context of the GPU, as DeviceContext::check.
void check_shared_contexts(int device);

}  // namespace weft
