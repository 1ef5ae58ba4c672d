// Interleaved timing: every contender once a round, so that a slow moment of the machine meets all of them.
#pragma once

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "bench/operands.h"
#include "bench/peer.h"

namespace weft::tool {

struct Contender {
  std::string name;
  double flops = 0;                                           // of one call
  std::function<double()> sample;                             // seconds of one call
  double patience = std::numeric_limits<double>::infinity();  // seconds of samples after which it sits out
  std::vector<std::optional<double>> seconds = {};            // by round
};

// Weft on operands that outlive the contender; runs once to warm up. Error if the kernel refuses.
Contender weft_contender(const BenchTask& task, Operands& operands, const std::string& kernel, int threads);
// None if the peer refuses.
std::optional<Contender> peer_contender(Peer& peer, const BenchTask& task, const Rival& rival, int threads);
std::optional<Contender> gemm_contender(Peer& peer, DType dtype, int threads);

void run_rounds(const std::vector<Contender*>& contenders, Index rounds);

double gflops(const Contender& c);
// How many times as fast as `other`, in flops: the median over the rounds in which both ran.
double ratio(const Contender& c, const Contender& other);

}  // namespace weft::tool
