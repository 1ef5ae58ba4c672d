// What choosing costs: a batch of 8,192 tokens a rank in documents of all lengths, one kind of layer.
#include "weft/choose.h"

#include <cmath>
#include <random>

#include <benchmark/benchmark.h>

#include "check/cases/trees.h"

namespace {

using weft::Index;

// Lognormal, none above a quarter of the batch.
std::vector<Index> documents(Index tokens) {
  std::mt19937_64 engine(1);
  std::normal_distribution<double> normal;
  std::vector<Index> lengths;
  for (Index left = tokens; left > 0; left -= lengths.back())
    lengths.push_back(
        std::min({std::max<Index>(1, std::llround(600 * std::exp(1.4 * normal(engine)))), tokens / 4, left}));
  return lengths;
}

// layers_ms: attention of 32 such layers, forward and backward, as predicted.
void choose_for(benchmark::State& state, weft::Problem problem) {
  const weft::Layer layer{.problem = std::move(problem),
                          .heads_q = 64,
                          .heads_k = 8,
                          .shape = {.dtype = weft::DType::bf16, .dim_qk = 128, .dim_v = 128},
                          .count = 32};
  const weft::Machine& machine = weft::machine_preset("h100-400g");
  double seconds = 0;
  for (auto _ : state) seconds = weft::choose({&layer, 1}, state.range(0), machine).seconds;
  state.counters["documents"] = static_cast<double>(layer.problem.packing().sequences());
  state.counters["layers_ms"] = 1e3 * seconds;
}

void choose(benchmark::State& state, Index window) {
  const std::vector<Index> lengths = documents(8192 * state.range(0));
  choose_for(state, weft::Problem(weft::Stream::from_lengths(lengths), {.causal = true, .left = window}));
}

// A tree of 10,000 nodes of 128 rows, two children each.
void choose_for_a_tree(benchmark::State& state) {
  weft::check::TreeShape tree;
  for (Index n = 0; n < 10000; ++n) tree.add(n == 0 ? -1 : (n - 1) / 2, 128);
  choose_for(state, weft::Problem(weft::Stream::from_lengths(std::vector<Index>{tree.rows()}),
                                  {.slices = weft::check::tree_slices(tree)}));
}

BENCHMARK_CAPTURE(choose, full, -1)->Arg(8)->Arg(64)->Arg(512)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(choose, window_4096, 4096)->Arg(8)->Arg(64)->Arg(512)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(choose, window_512, 512)->Arg(8)->Arg(64)->Arg(512)->Unit(benchmark::kMillisecond);
BENCHMARK(choose_for_a_tree)->Arg(8)->Arg(64)->Unit(benchmark::kMillisecond);

}  // namespace
