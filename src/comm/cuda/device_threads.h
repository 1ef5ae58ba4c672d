// Ranks that are threads and share a GPU, or have one each: the GPU copies directly between the ranks' memory, in a
// stream of the receiver that has no other work.
#pragma once

#include <memory>

#include "comm/cuda/host_call.h"
#include "weft/communicator.h"

namespace weft::cuda {

// Where all ranks post their sends and receives.
struct Board;
std::shared_ptr<Board> make_board(Index ranks);

std::unique_ptr<DeviceCommunicator> make_device_threads(Communicator& ranks, std::shared_ptr<Board> board,
                                                        const Place& place, HostCall host_call);

}  // namespace weft::cuda
