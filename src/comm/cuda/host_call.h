// What communicators of a GPU need of the one that they are made of.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "weft/communicator.h"

namespace weft::cuda {

// A call between the CPUs of the same ranks, not counted as traffic.
using HostCall = std::function<std::unique_ptr<Request::Pending>(std::vector<Message>, std::vector<Message>)>;

}  // namespace weft::cuda
