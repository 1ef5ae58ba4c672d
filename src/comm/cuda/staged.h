// Memory of a GPU over a communicator that knows no streams (MPI, a process group): a call packs what it sends, the CPU
// waits until that is there, and the other communicator moves it; wait() unpacks what came. So the CPU does not run
// ahead of the GPU here, but messages still move under what is computed meanwhile.
#pragma once

#include <memory>

#include "comm/cuda/host_call.h"
#include "weft/communicator.h"

namespace weft::cuda {

// Where messages lie while they are moved: in memory of the host, or, if the other communicator reads and writes that
// too (a CUDA-aware MPI), of the GPU.
enum class Staging { host, device };

std::unique_ptr<DeviceCommunicator> make_staged(Communicator& ranks, const Place& place, Staging staging,
                                                HostCall host_call);

// Collective: do two ranks have the same GPU? NCCL does not go with that.
bool share_a_gpu(const Communicator& ranks, const Place& place, const HostCall& host_call);

}  // namespace weft::cuda
