// Memory of a GPU over something that moves it in the order of streams, but in one piece a message: a process group of
// PyTorch. What does not lie side by side is packed and unpacked in the caller's stream; the CPU waits for nothing.
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

// Starts to move them: what is sent is what is there when the place's stream comes to it, and wait() lets that stream
// wait for what is received. Without wait() the end does the same: the memory is given back in the stream.
using Carry = std::function<std::unique_ptr<Request::Pending>(const Place& place, std::span<const Parcel> sends,
                                                              std::span<const Parcel> receives)>;

std::unique_ptr<DeviceCommunicator> make_packed(Communicator& ranks, const Place& place, Carry carry);

}  // namespace weft::cuda
