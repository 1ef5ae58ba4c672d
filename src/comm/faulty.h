// A communicator that plants faults in chosen calls, for tests of what must be noticed and of what must do no harm.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "weft/communicator.h"

namespace weft {

struct Fault {
  enum class Kind {
    delay,     // the call starts, or is waited for, `seconds` later than asked
    reorder,   // later calls in flight end before this one
    truncate,  // a message is shorter than it was, or only its front arrives
    corrupt,   // some bits of a message change
    drop,      // a message is never sent
    lose,      // the whole call: nothing is sent or received, and wait() returns as if all were well
    fail,      // the rank throws with the call in flight
  };
  Kind kind = Kind::delay;
  Index rank = 0, call = 0;  // calls of a communicator are numbered from 0
  double seconds = 0;
  std::uint64_t seed = 0;  // which message, which bits
};

std::span<const Fault::Kind> fault_kinds();
std::string_view name(Fault::Kind kind);

// A fault of this kind, on a rank and in a call drawn from the seed.
Fault make_fault(Fault::Kind kind, std::uint64_t seed, Index ranks, Index calls, double seconds);

// `inner` and `calls`, which counts the calls that were started, must outlive it. Splits have the same plan, in their
// own ranks and calls; calls on GPUs, of its on(place), are numbered with those on the CPU.
std::unique_ptr<Communicator> make_faulty(Communicator& inner, std::vector<Fault> plan, Index* calls = nullptr);

}  // namespace weft
