// GPU memory over a communicator without streams (MPI, a process group): a call packs its sends, the CPU waits for
// that, and the other communicator moves them; wait() unpacks what came. So the CPU does not run ahead of the GPU, but
// messages still overlap with compute.
#pragma once

#include <memory>

#include "comm/cuda/host_call.h"
#include "weft/communicator.h"

namespace weft::cuda {

// Where messages are staged: in host memory or, if the other communicator can access it (a CUDA-aware MPI), on the GPU.
enum class Staging { host, device };

std::unique_ptr<DeviceCommunicator> make_staged(Communicator& ranks, const Place& place, Staging staging,
                                                HostCall host_call);

// Collective: do two ranks have the same GPU? NCCL does not support that.
bool share_a_gpu(const Communicator& ranks, const Place& place, const HostCall& host_call);

}  // namespace weft::cuda
