// What packing costs: lognormal documents, best-fit decreasing, in order, and with a limit of pairs.
#include <algorithm>
#include <cmath>
#include <random>

#include <benchmark/benchmark.h>

#include "weft/prepare.h"

namespace {

using weft::Index;

std::vector<Index> documents(Index count) {
  std::mt19937_64 engine(1);
  std::normal_distribution<double> normal;
  std::vector<Index> lengths;
  for (Index i = 0; i < count; ++i)
    lengths.push_back(std::clamp<Index>(static_cast<Index>(400 * std::exp(normal(engine))), 1, 4096));
  return lengths;
}

void pack(benchmark::State& state, bool keep_order, double pair_limit = 0) {
  const std::vector<Index> lengths = documents(state.range(0));
  weft::PackReport report;
  for (auto _ : state)
    report =
        weft::pack_documents(lengths, {.budget = 65536, .keep_order = keep_order, .pair_limit = pair_limit}).report;
  state.counters["packs"] = static_cast<double>(report.packs);
  state.counters["least"] = static_cast<double>(report.least_packs);
  state.counters["waste"] = report.waste;
  state.counters["pair_balance"] = report.pair_balance;
}

BENCHMARK_CAPTURE(pack, best_fit, false)->RangeMultiplier(10)->Range(1000, 1000000)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(pack, in_order, true)->Arg(100000)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(pack, pair_limit, false, 1.1)
    ->RangeMultiplier(10)
    ->Range(1000, 1000000)
    ->Unit(benchmark::kMillisecond);

}  // namespace
