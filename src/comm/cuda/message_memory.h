// Messages on a GPU, for communicators that wrap others (comm/message_memory.h).
#pragma once

#include <memory>

#include "comm/message_memory.h"

namespace weft::cuda {

// All work is in the stream of the place.
std::unique_ptr<MessageMemory> make_message_memory(const Place& place);

}  // namespace weft::cuda
