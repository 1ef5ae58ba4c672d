// The problems that `weft bench` times on the CPU, each with its dtypes, passes and peers.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "flags/flags.h"
#include "weft/kernel.h"

namespace weft::tool {

// Another way to do the same work, timed in the same rounds.
struct Rival {
  enum class Kind {
    sdpa,    // the peer's attention, one dense call
    loop,    // a call a document, K/V heads repeated, documents by split()
    slices,  // the same, documents by q[begin:end]: the usual way, whose backward fills whole tensors
    mask,    // one call over all tokens with a block-diagonal boolean mask
    weft,    // Weft itself in another dtype
  };
  Kind kind = Kind::sdpa;
  DType dtype = DType::f32;
};
std::string_view name(Rival::Kind kind);

enum class Timing {
  rounds,   // interleaved with the peers
  once,     // one run: too long for rounds, there for its memory
  scaling,  // all threads against one
};

// One problem in one dtype and one pass: one group of lines in the table.
struct BenchTask {
  std::string name;
  check::Case problem = {};  // in its dtype
  Pass pass = Pass::forward;
  Timing timing = Timing::rounds;
  std::vector<Rival> rivals = {};
};
std::string_view name(Pass pass);

// The tasks that --cases, --dtype, --pass or the flags of a problem choose. Error if they choose none.
std::vector<BenchTask> bench_tasks(const Flags& flags);
// Do flags say a problem, in place of named cases?
bool has_own_problem(const Flags& flags);
// Whole documents, one after another, causal or not (with `windows`: or those to the left), and no more.
bool plain(const check::Case& problem, bool windows = false);
void list_bench_cases();

// Useful operations (multiplications and additions) of one visible pair and query head. Forward: 2·dim_qk for the logit
// and 2·dim_v for P·V; backward: three products of width dim_qk (the logit recomputed, dQ, dK) and two of width dim_v
// (dP, dV).
Index flops_per_pair(Pass pass, Index dim_qk, Index dim_v);
double useful_flops(const BenchTask& task);  // of all visible pairs

}  // namespace weft::tool
