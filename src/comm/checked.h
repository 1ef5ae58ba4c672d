// A communicator whose messages carry what is needed to see that they arrived whole, in order and unchanged.
#pragma once

#include <memory>

#include "weft/communicator.h"

namespace weft {

// Lives no longer than `inner`. Every message grows by 32 bytes, which `inner` counts and the result does not.
std::unique_ptr<Communicator> make_checked(Communicator& inner);

}  // namespace weft
