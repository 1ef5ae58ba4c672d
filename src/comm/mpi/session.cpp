#include "comm/mpi/session.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

#include "index.h"
#include "text.h"
#include "weft/mpi.h"

namespace weft {
namespace mpi {
namespace {

std::atomic<bool> is_lost{false};

[[noreturn]] void end_job() {
  MPI_Abort(MPI_COMM_WORLD, 1);
  std::_Exit(1);  // an MPI that returns from that
}

[[noreturn]] void end_job(const char* what) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::fprintf(stderr, "rank %d: %s\n", rank, what);
  std::fflush(nullptr);
  end_job();
}

}  // namespace

void check(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char buffer[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, buffer, &length);
  throw Error(text(what, ": ", std::string(buffer, at(length))), "see to MPI, or the ranks' logs");
}

bool lost() { return is_lost; }
void set_lost() { is_lost = true; }
void require_not_lost() {
  if (!lost()) return;
  throw Error("a call was given up before its messages had ended, so MPI cannot be used any more",
              "end the job (MPI_Abort); see which request went without wait(), or what failed first");
}

bool running() {
  int begun = 0, over = 0;
  MPI_Initialized(&begun);
  MPI_Finalized(&over);
  return begun != 0 && over == 0;
}

bool cuda_aware() {
#ifdef MPIX_CUDA_AWARE_SUPPORT
  return MPIX_Query_cuda_support() == 1;
#else
  return false;
#endif
}

}  // namespace mpi

MpiSession::MpiSession() : exceptions_(std::uncaught_exceptions()) {
  int begun = 0, over = 0;
  MPI_Initialized(&begun);
  MPI_Finalized(&over);
  if (over != 0) throw Error("MPI was finalised already", "make one MpiSession, at the start of main()");
  if (begun != 0) return;
  int level = 0;
  mpi::check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level), "MPI_Init_thread");
  mine_ = true;
}

MpiSession::~MpiSession() {
  if (!mine_ || !mpi::running()) return;
  if (mpi::lost() || std::uncaught_exceptions() > exceptions_) mpi::end_job();
  MPI_Finalize();
}

void run_mpi(const std::function<void(Communicator&)>& body, const MpiOptions& options) {
  const MpiSession session;
  try {
    body(*mpi_world(options));
  } catch (const std::exception& e) {
    mpi::end_job(e.what());
  } catch (...) {
    mpi::end_job("an exception without a text");
  }
}

}  // namespace weft
