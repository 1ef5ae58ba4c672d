#include "flags/process_ranks.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>

#include <sys/mman.h>

#include "weft/error.h"
#include "weft/flight.h"
#include "weft/processes.h"
#ifdef WEFT_WITH_MPI
#include "weft/mpi.h"
#endif

namespace weft::tool {
namespace {

Communicator* current = nullptr;

void keep_flight(const std::string& path) { keep_flight_file({.path = path, .on_failure = true, .signal = SIGUSR1}); }

int run_on(Communicator& world, const Flags& flags, int (*verb)(const Flags&)) {
  if (world.rank() > 0 && std::freopen("/dev/null", "w", stdout) == nullptr)
    throw Error("cannot open /dev/null", "all ranks but the first write there");
  current = &world;
  if (flags.given("flight")) keep_flight(*flags.find("flight") + "." + std::to_string(world.rank()));
  const int code = verb(flags);
  current = nullptr;
  return code;
}

int on_mpi([[maybe_unused]] const Flags& flags, [[maybe_unused]] int (*verb)(const Flags&)) {
#ifdef WEFT_WITH_MPI
  int code = 1;
  run_mpi([&](Communicator& world) { code = run_on(world, flags, verb); });
  return code;
#else
  throw Error("--comm mpi in a build without MPI", "install Open MPI (tools/setup.sh build) and build again");
#endif
}

int on_forked(const Flags& flags, int (*verb)(const Flags&)) {
  // Memory that the ranks share with this process: the verb's exit code.
  void* shared = ::mmap(nullptr, sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) throw std::bad_alloc();
  int* code = new (shared) int(1);
  run_processes(flags.whole("ranks", 4, "4"), [&](Communicator& world) {
    // NCCL lets ranks share a GPU only if they say that they are on different hosts. It then goes over sockets.
    ::setenv("NCCL_HOSTID", std::to_string(world.rank()).c_str(), 0);
    const int mine = run_on(world, flags, verb);
    if (world.rank() == 0) *code = mine;
  });
  const int result = *code;
  ::munmap(shared, sizeof(int));
  return result;
}

}  // namespace

bool asks_for_processes(const Flags& flags) {
  const std::string name = flags.text("comm", "");
  return name == "mpi" || name == "processes";
}

Communicator* process_world() { return current; }

int on_processes(const Flags& flags, int (*verb)(const Flags&)) {
  return flags.text("comm", "") == "mpi" ? on_mpi(flags, verb) : on_forked(flags, verb);
}

int in_this_process(const Flags& flags, int (*verb)(const Flags&)) {
  if (!flags.given("flight")) return verb(flags);
  keep_flight(*flags.find("flight"));
  const int code = verb(flags);
  keep_flight_file({});
  return code;
}

}  // namespace weft::tool
