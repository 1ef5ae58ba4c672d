// The communicator of a rank that is a thread.
#pragma once

#include <memory>

#include "comm/threads/world.h"

namespace weft::threads {

std::unique_ptr<Communicator> make_communicator(Member self);

}  // namespace weft::threads
