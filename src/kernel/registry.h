// The registry for those who call a kernel many times on what they have checked once.
#pragma once

#include "weft/kernel.h"

namespace weft {

// The best kernel meant by the name that can do the request; Error with the reasons if there is none.
const Kernel& select_kernel(std::string_view name, const KernelRequest& request);

}  // namespace weft
