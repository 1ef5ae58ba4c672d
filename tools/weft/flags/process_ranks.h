// A verb on ranks that are processes: those that mpirun started, or that the command starts itself.
#pragma once

#include "flags/flags.h"
#include "weft/communicator.h"

namespace weft::tool {

// --comm mpi or --comm processes is given.
bool asks_for_processes(const Flags& flags);
// Runs the verb on every rank; rank 0 alone prints. A rank that throws ends all. Error for MPI in a build without it.
int on_processes(const Flags& flags, int (*verb)(const Flags&));
// The verb in this process alone, whose ranks are threads. Both keep the file of --flight.
int in_this_process(const Flags& flags, int (*verb)(const Flags&));
// Of the verb that runs now; null if its ranks are threads.
Communicator* process_world();

}  // namespace weft::tool
