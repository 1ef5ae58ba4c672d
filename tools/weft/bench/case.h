// What `weft bench` times: named problems, each with its dtypes, passes and peers.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "flags/flags.h"
#include "weft/kernel.h"

namespace weft::tool {

// Somebody else's way to do the same work, timed in the same rounds.
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
void list_bench_cases();

// Multiplications and additions of the visible pairs alone. A pair and query head costs, forward, 2·dim_qk for its
// logit and 2·dim_v for its share of out; backward, three products of width dim_qk (the logit anew, dq, dk) and two of
// width dim_v (dp, dv).
double useful_flops(const BenchTask& task);

}  // namespace weft::tool
