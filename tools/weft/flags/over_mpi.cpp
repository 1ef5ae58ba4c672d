#include "flags/over_mpi.h"

#include <cstdio>

#include "weft/error.h"
#ifdef WEFT_WITH_MPI
#include "weft/mpi.h"
#endif

namespace weft::tool {
namespace {

Communicator* current = nullptr;

}  // namespace

bool asks_for_mpi(const Flags& flags) { return flags.text("comm", "") == "mpi"; }

Communicator* mpi_world() { return current; }

#ifdef WEFT_WITH_MPI
int over_mpi(const Flags& flags, int (*verb)(const Flags&)) {
  int code = 1;
  run_mpi([&](Communicator& world) {
    if (world.rank() > 0 && std::freopen("/dev/null", "w", stdout) == nullptr)
      throw Error("cannot open /dev/null", "all ranks but the first write there");
    current = &world;
    code = verb(flags);
    current = nullptr;
  });
  return code;
}
#else
int over_mpi(const Flags&, int (*)(const Flags&)) {
  throw Error("--comm mpi in a build without MPI", "install Open MPI (tools/setup.sh build) and build again");
}
#endif

}  // namespace weft::tool
