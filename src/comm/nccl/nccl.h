// Ranks that have a GPU each, over NCCL. The host communicator exchanges the NCCL id and gives rank and size.
#pragma once

#include <memory>

#include "weft/communicator.h"

namespace weft {

// Collective. The place's device is this rank's.
std::unique_ptr<DeviceCommunicator> make_nccl(Communicator& ranks, const Place& place);

}  // namespace weft
