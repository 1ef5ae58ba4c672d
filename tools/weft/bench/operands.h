// The tensors of one timed call, allocated and written before any clock starts.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "bench/case.h"
#include "check/tensors.h"
#include "weft/executor.h"
#include "weft/kernel.h"

namespace weft::tool {

class Operands {
 public:
  explicit Operands(const BenchTask& task);  // all tokens, for the call of a kernel
  // A rank's shard, for an executor.
  Operands(const check::Case& c, Index q_rows, Index k_rows, bool backward, std::uint64_t seed);
  Operands(const Operands&) = delete;  // views point into it

  void run(Executor& executor, Pass pass);
  // The pass itself.
  void run(std::string_view kernel);
  // What a backward needs of a forward. Without it `out` and `lse` hold plausible numbers that are no results: enough
  // to see how much memory the backward takes.
  void run_forward(std::string_view kernel);

  Index bytes() const;  // inputs and outputs

 private:
  Operands(const BenchTask& task, const Problem& problem);
  check::Tensor filled(Index rows, Index heads, Index dim);

  check::Case case_;
  std::vector<Slice> slices_;
  std::uint64_t random_;
  std::vector<float> sink_, dsink_;  // [hq]
  Attention attention_;
  check::Tensor q_, k_, v_, out_, lse_;
  struct Gradients {
    check::Tensor dout, dq, dk, dv;
  };
  std::optional<Gradients> gradients_;  // of a backward
};

}  // namespace weft::tool
