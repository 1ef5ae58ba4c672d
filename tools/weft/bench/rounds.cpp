#include "bench/rounds.h"

#include <algorithm>
#include <cmath>
#include <thread>

#include <fmt/format.h>

#include "bench/clock.h"

namespace weft::tool {
namespace {

// A sample is as many calls as fill this, so that clock and wake-up do not count; the peer keeps to it too.
constexpr double kSampleSeconds = 0.01;
constexpr double kMostCalls = 1000;
// Threads of a pool spin for some milliseconds after their last work, which would slow the next contender.
constexpr std::chrono::milliseconds kRest(20);
// Large enough that a gemm reaches its rate, small enough to be part of every round.
constexpr Index kGemmSize = 1536;
// Torch's bf16 attention takes seconds a call: five rounds of it where the machine is not slower than usual.
constexpr double kPeerPatience = 60;

double timed(Operands& operands, const std::string& kernel, int calls) {
  const double start = seconds_now();
  for (int i = 0; i < calls; ++i) operands.run(kernel);
  const double seconds = (seconds_now() - start) / calls;
  std::this_thread::sleep_for(kRest);
  return seconds;
}

double spent(const Contender& c) {
  double sum = 0;
  for (const std::optional<double>& s : c.seconds) sum += s.value_or(0);
  return sum;
}

}  // namespace

Contender weft_contender(const BenchTask& task, Operands& operands, const std::string& kernel, int threads) {
  set_cpu_threads(threads);
  if (task.pass == Pass::backward) operands.run_forward(kernel);
  operands.run(kernel);  // pools start, code is paged in
  const double once = timed(operands, kernel, 1);
  const int calls = static_cast<int>(std::clamp(std::ceil(kSampleSeconds / once), 1.0, kMostCalls));
  const auto sample = [&operands, kernel, threads, calls] {
    set_cpu_threads(threads);
    return timed(operands, kernel, calls);
  };
  return {fmt::format("weft {}", weft::name(task.problem.dtype)), useful_flops(task), sample};
}

std::optional<Contender> peer_contender(Peer& peer, const BenchTask& task, const Rival& rival, int threads) {
  const std::optional<int> id = peer.prepare(task, rival, threads);
  if (!id) return {};
  return Contender{fmt::format("{} {} {}", peer.name(), name(rival.kind), weft::name(rival.dtype)), useful_flops(task),
                   [&peer, at = *id, threads] { return peer.time(at, threads); }, kPeerPatience};
}

std::optional<Contender> gemm_contender(Peer& peer, DType dtype, int threads) {
  const DType type = dtype == DType::bf16 ? DType::bf16 : DType::f32;
  const std::optional<int> id = peer.prepare_gemm(type, kGemmSize, threads);
  if (!id) return {};
  return Contender{fmt::format("{} gemm {}", peer.name(), weft::name(type)), 2 * std::pow(kGemmSize, 3),
                   [&peer, at = *id, threads] { return peer.time(at, threads); }};
}

void run_rounds(const std::vector<Contender*>& contenders, Index rounds) {
  for (Index round = 0; round < rounds; ++round) {
    for (Contender* c : contenders) {
      const bool sits_out = spent(*c) > c->patience;
      c->seconds.push_back(sits_out ? std::optional<double>() : c->sample());
    }
  }
}

double gflops(const Contender& c) {
  std::vector<double> rates;
  for (const std::optional<double>& s : c.seconds) {
    if (s) rates.push_back(c.flops / *s * 1e-9);
  }
  return median(std::move(rates));
}

double ratio(const Contender& c, const Contender& other) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < c.seconds.size(); ++i) {
    if (c.seconds[i] && other.seconds[i]) ratios.push_back(c.flops / *c.seconds[i] / (other.flops / *other.seconds[i]));
  }
  return median(std::move(ratios));
}

}  // namespace weft::tool
