// Ranks that are processes of this machine, without MPI or PyTorch: several GPUs of one node from a single C++ program.
#pragma once

#include <functional>

#include "weft/communicator.h"
#include "weft/config.h"

namespace weft {

// Limits of ranks that are forked processes.
struct ProcessRanks {
  double time_limit = 300;  // seconds without a message that a rank waits in a call before it gives up with an Error
  double grace = 10;        // seconds that ranks have to end after one has failed; then they are killed
};

// Forks `ranks` processes that run body(communicator) and end; returns when all have ended. They talk over sockets, and
// over NCCL where Communicator::on is given a GPU. If one throws, dies or leaves while others wait for it, they end
// with an Error that names it; then the first failure is thrown here, "rank 2: ...". What the body changes in memory is
// lost with its process. Call it before this process has started threads or used CUDA, which forked processes cannot
// share.
WEFT_API void run_processes(Index ranks, const std::function<void(Communicator&)>& body, const ProcessRanks& how = {});

}  // namespace weft
