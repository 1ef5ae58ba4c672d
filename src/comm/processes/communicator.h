// The communicator of a rank that is a process.
#pragma once

#include <memory>

#include "comm/board.h"
#include "comm/processes/sockets.h"
#include "weft/communicator.h"

namespace weft::processes {

std::unique_ptr<Communicator> make_communicator(Index ranks, std::shared_ptr<Sockets> sockets,
                                                std::shared_ptr<detail::BoardMemory> board, double time_limit);

}  // namespace weft::processes
