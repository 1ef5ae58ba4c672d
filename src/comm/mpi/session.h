// Errors of MPI, and whether it can still be called.
#pragma once

#include <mpi.h>

namespace weft::mpi {

// Throws Error unless `code`, which the MPI function `what` returned, is success.
void check(int code, const char* what);

// Set when a call was given up whose messages MPI did not end. MPI must not run after that, or it would touch memory
// that the call no longer owns; all that is left is to end the job.
bool lost();
void set_lost();
void require_not_lost();

// Whether MPI is initialised and not finalised.
bool running();
// Whether MPI moves GPU memory.
bool cuda_aware();

}  // namespace weft::mpi
