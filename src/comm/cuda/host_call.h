// What GPU communicators need of the host communicator that they are made from.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "weft/communicator.h"

namespace weft::cuda {

// An exchange between the CPUs of the same ranks, not counted as traffic.
using HostCall = std::function<std::unique_ptr<Request::Pending>(std::vector<Message>, std::vector<Message>)>;

}  // namespace weft::cuda
