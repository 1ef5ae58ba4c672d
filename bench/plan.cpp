// Planning time against documents and ranks: what one rank pays for its plan, and what a whole layout costs.
#include "weft/plan.h"

#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include "index.h"

namespace weft {
namespace {

// `count` documents of 64 to 4,159 tokens, lengths without a pattern.
Stream documents(Index count) {
  std::vector<Index> lengths(at(count));
  std::uint64_t x = 88172645463325252u;
  for (Index& n : lengths) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;  // xorshift
    n = 64 + static_cast<Index>(x % 4096);
  }
  return Stream::from_lengths(lengths);
}

Layout layout_of(LayoutKind kind, const Problem& problem, Index ranks) { return make_layouts(kind, problem, ranks).q; }

Problem causal(LayoutKind kind, Index count, Index ranks) {
  const Stream stream = documents(count);
  return Problem(kind == LayoutKind::dual_chunk ? stream.padded_to(2 * ranks) : stream, {.causal = true});
}

benchmark::Counter time_per(Index items) {
  return {static_cast<double>(items), benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert};
}

// One rank's plan, keys in sequence order (rank order for striped): layout, runs and slices made anew each time.
void one_rank(benchmark::State& state, LayoutKind kind) {
  const Index count = state.range(0), ranks = state.range(1);
  const Problem problem = causal(kind, count, ranks);
  std::size_t slices = 0;
  for (auto _ : state) {
    const Layout layout = layout_of(kind, problem, ranks);
    const Plan plan = make_plan(problem, layout.runs(ranks / 3),
                                kind == LayoutKind::striped ? layout.rank_order() : layout.sequence_order());
    slices = plan.slices.size();
    benchmark::DoNotOptimize(slices);
  }
  state.counters["slices"] = static_cast<double>(slices);
  state.counters["per_doc"] = time_per(count);
}

// A window: only the pieces it reaches are looked at, however many ranks there are.
void window_rank_order(benchmark::State& state) {
  const Index count = state.range(0), ranks = state.range(1);
  const Problem problem(documents(count).padded_to(2 * ranks), {.causal = true, .left = 512});
  const Layout layout = Layout::dual_chunk(problem.packing().q(), ranks);
  std::size_t slices = 0;
  for (auto _ : state) slices = make_plan(problem, layout.runs(ranks / 3), layout.rank_order()).slices.size();
  state.counters["slices"] = static_cast<double>(slices);
  state.counters["per_slice"] = time_per(static_cast<Index>(slices));
}

void balanced(benchmark::State& state) {
  const Problem problem = causal(LayoutKind::balanced, state.range(0), state.range(1));
  double share = 0;
  for (auto _ : state) {
    const Layout layout = Layout::balanced(problem, state.range(1));
    state.PauseTiming();
    share = imbalance(pairs_by_rank(problem, layout));
    state.ResumeTiming();
  }
  state.counters["balance"] = share;
}

void placed(benchmark::State& state) {
  const Problem problem = causal(LayoutKind::placed, state.range(0), state.range(1));
  for (auto _ : state) benchmark::DoNotOptimize(Layout::placed(problem, state.range(1)).rows());
}

void sizes(benchmark::internal::Benchmark* b, std::vector<std::int64_t> docs, std::vector<std::int64_t> ranks) {
  b->ArgNames({"docs", "ranks"})->ArgsProduct({std::move(docs), std::move(ranks)})->Unit(benchmark::kMillisecond);
}
void up_to_100k(benchmark::internal::Benchmark* b) { sizes(b, {100, 1000, 10000, 100000}, {8, 64, 1024}); }
void up_to_10k(benchmark::internal::Benchmark* b) { sizes(b, {100, 1000, 10000}, {8, 64, 1024}); }
void up_to_512(benchmark::internal::Benchmark* b) { sizes(b, {100, 1000, 10000}, {8, 64, 512}); }
void few_ranks(benchmark::internal::Benchmark* b) { sizes(b, {100, 1000, 10000}, {8, 64}); }

BENCHMARK_CAPTURE(one_rank, zigzag, LayoutKind::zigzag)->Apply(up_to_100k);
BENCHMARK_CAPTURE(one_rank, dual_chunk, LayoutKind::dual_chunk)->Apply(up_to_100k);
BENCHMARK_CAPTURE(one_rank, contiguous, LayoutKind::contiguous)->Apply(up_to_10k);
BENCHMARK_CAPTURE(one_rank, striped, LayoutKind::striped)->Apply(few_ranks);
BENCHMARK(window_rank_order)->Apply(up_to_10k);
BENCHMARK(balanced)->Apply(up_to_10k)->MinTime(0.1);
BENCHMARK(placed)->Apply(up_to_512)->MinTime(0.1);

}  // namespace
}  // namespace weft
