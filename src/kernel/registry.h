// The registry for callers that check arguments once and call a kernel many times, and reasons that kernels share.
#pragma once

#include "weft/kernel.h"

namespace weft {

// The best kernel meant by the name that can do the request; Error with the reasons if there is none.
const Kernel& select_kernel(std::string_view name, const KernelRequest& request);

// Why a kernel with f32 accumulators cannot take the dtype; none if it can.
std::optional<std::string> f32_refusal(DType dtype);

}  // namespace weft
