// Ranks that are processes, over MPI. A library of its own, weft::mpi: libweft needs no MPI, and no type of MPI is
// here.
//
// All communicators of a process are used by one thread at a time (MPI_THREAD_SERIALIZED).
#pragma once

#include <functional>
#include <memory>

#include "weft/communicator.h"

namespace weft {

// Limits of an MPI communicator.
struct MpiOptions {
  double time_limit = 300;  // seconds without progress that a rank waits in a call before it gives up with an Error
  Index largest = Index{1} << 30;  // bytes of one MPI message; longer ones go in pieces, because MPI counts in an int
};

// Initialises MPI unless somebody has, and then finalises it at the end; communicators must be gone by then. If the end
// comes by an exception, or a call could not be given up (below), it ends the job instead (MPI_Abort): to finalise
// would be to wait for ranks that wait for this one.
class WEFT_API MpiSession {
 public:
  MpiSession();
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

 private:
  bool mine_ = false;
  int exceptions_ = 0;  // under way when it was made
};

// Collective. Duplicates of MPI_COMM_WORLD, or of the communicator whose Fortran handle (MPI_Comm_c2f) is given: Weft's
// messages never meet the caller's.
//
// A request that goes without wait() takes its receives back and lets its sends end, for a second if an exception is
// the reason and for the time limit if not. If they do not end, MPI still holds memory of the caller, so every later
// call throws and only the end of the job is left.
WEFT_API std::unique_ptr<Communicator> mpi_world(const MpiOptions& options = {});
WEFT_API std::unique_ptr<Communicator> mpi_communicator(int fortran_handle, const MpiOptions& options = {});

// What main() of a program calls: a session, the world, body(world). If the body throws, prints "rank 2: <text>" to
// stderr and ends the whole job with status 1. For programs, not for libraries: nothing else of Weft prints or aborts.
WEFT_API void run_mpi(const std::function<void(Communicator&)>& body, const MpiOptions& options = {});

}  // namespace weft
