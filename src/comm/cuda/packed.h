// GPU memory over a transport that is stream-ordered but moves one contiguous buffer per message: a process group of
// PyTorch. Other messages are packed and unpacked in the caller's stream; the CPU waits for nothing.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "weft/communicator.h"

namespace weft::cuda {

struct Parcel {
  Index peer = 0;
  void* data = nullptr;
  Index bytes = 0;
};

// Starts the transfers in the order of the place's stream; wait() makes that stream wait for what is received. Without
// wait() the destructor does the same, because the memory is freed in stream order.
using Carry = std::function<std::unique_ptr<Request::Pending>(const Place& place, std::span<const Parcel> sends,
                                                              std::span<const Parcel> receives)>;

std::unique_ptr<DeviceCommunicator> make_packed(Communicator& ranks, const Place& place, Carry carry);

}  // namespace weft::cuda
