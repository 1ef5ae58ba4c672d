// A verb on ranks that are processes, which mpirun started.
#pragma once

#include "flags/flags.h"
#include "weft/communicator.h"

namespace weft::tool {

// --comm mpi is given.
bool asks_for_mpi(const Flags& flags);
// Runs the verb on this rank; rank 0 alone prints. A rank that throws ends the job. Error in a build without MPI.
int over_mpi(const Flags& flags, int (*verb)(const Flags&));
// Of the verb that runs now; null if its ranks are threads.
Communicator* mpi_world();

}  // namespace weft::tool
