// What the MPI files share: errors of MPI, and whether it can still be called.
#pragma once

#include <mpi.h>

namespace weft::mpi {

// Error unless MPI says that it went well. `what`: the function.
void check(int code, const char* what);

// Set when a call was given up whose messages MPI would not let go of. After that MPI must not run again, or it would
// touch memory that is not the call's any more; what is left is to end the job.
bool lost();
void set_lost();
void require_not_lost();

// MPI can be called at all.
bool running();
// It moves memory of GPUs as it does that of CPUs.
bool cuda_aware();

}  // namespace weft::mpi
