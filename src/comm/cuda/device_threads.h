// Ranks that are threads and share a GPU, or have one each: bytes are copied from one rank's memory to another's by the
// GPU, in a stream of the receiver's that nothing else is done in.
#pragma once

#include <memory>

#include "comm/cuda/host_call.h"
#include "weft/communicator.h"

namespace weft::cuda {

// Where all ranks put what they send and receive.
struct Board;
std::shared_ptr<Board> make_board(Index ranks);

std::unique_ptr<DeviceCommunicator> make_device_threads(Communicator& ranks, std::shared_ptr<Board> board,
                                                        const Place& place, HostCall host_call);

}  // namespace weft::cuda
