// Planning time against documents and ranks: what one rank pays for its plan, and what a whole layout costs.
#include "weft/plan.h"

#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include "check/cases/trees.h"
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

// Trees of so many nodes: any (each node below one of the 64 before it), two children a node, or a history with a
// branch at every turn. Nodes of 64 to 191 rows, or of 128.
enum class Nodes { any, two_children, history };
check::TreeShape tree_of(Nodes kind, Index count) {
  if (kind == Nodes::history) return check::history_tree(count / 2, 128, 128, true);
  check::TreeShape tree;
  std::uint64_t x = 88172645463325252u;
  for (Index n = 0; n < count; ++n) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    const Index back = 1 + static_cast<Index>(x >> 8 & 0xffff) % min_of(64, max_of(1, n));
    if (kind == Nodes::any)
      tree.add(n == 0 ? -1 : n - back, 64 + static_cast<Index>(x >> 40) % 128);
    else
      tree.add(n == 0 ? -1 : (n - 1) / 2, 128);
  }
  return tree;
}

Problem tree_problem(const check::TreeShape& tree, Index ranks) {
  return Problem(Stream::from_lengths(std::vector<Index>{tree.rows()}).padded_to(2 * ranks),
                 {.slices = check::tree_slices(tree)});
}

// A caller's slices checked and joined.
void tree_checked(benchmark::State& state, Nodes kind) {
  const check::TreeShape tree = tree_of(kind, state.range(0));
  std::size_t slices = 0;
  for (auto _ : state) slices = tree_problem(tree, 8).own_slices().size();
  state.counters["slices"] = static_cast<double>(slices);
}

// The plans of all ranks, each with its layout, keys in sequence order (rank order for striped).
void tree_plans(benchmark::State& state, Nodes nodes, LayoutKind kind) {
  const Index ranks = state.range(1);
  const Problem problem = tree_problem(tree_of(nodes, state.range(0)), ranks);
  std::size_t slices = 0;
  for (auto _ : state) {
    slices = 0;
    const Layout layout = layout_of(kind, problem, ranks);
    const RunList keys = kind == LayoutKind::striped ? layout.rank_order() : layout.sequence_order();
    for (Index r = 0; r < ranks; ++r) slices += make_plan(problem, layout.runs(r), keys).slices.size();
  }
  state.counters["slices"] = static_cast<double>(slices);
  state.counters["per_slice"] = time_per(static_cast<Index>(slices));
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

void tree_sizes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"nodes", "ranks"})->ArgsProduct({{1000, 10000, 100000}, {8}})->Unit(benchmark::kMillisecond);
}
BENCHMARK_CAPTURE(tree_checked, any, Nodes::any)->Apply(tree_sizes);
BENCHMARK_CAPTURE(tree_checked, two_children, Nodes::two_children)->Apply(tree_sizes);
BENCHMARK_CAPTURE(tree_checked, history, Nodes::history)->Apply(tree_sizes);
BENCHMARK_CAPTURE(tree_plans, contiguous, Nodes::any, LayoutKind::contiguous)->Apply(tree_sizes);
BENCHMARK_CAPTURE(tree_plans, dual_chunk, Nodes::any, LayoutKind::dual_chunk)->Apply(tree_sizes);
BENCHMARK_CAPTURE(tree_plans, zigzag, Nodes::any, LayoutKind::zigzag)->Apply(tree_sizes);
BENCHMARK_CAPTURE(tree_plans, striped, Nodes::any, LayoutKind::striped)->Apply(tree_sizes);
BENCHMARK_CAPTURE(tree_plans, balanced, Nodes::any, LayoutKind::balanced)->Apply(tree_sizes);
BENCHMARK_CAPTURE(tree_plans, two_children_zigzag, Nodes::two_children, LayoutKind::zigzag)->Apply(tree_sizes);
BENCHMARK_CAPTURE(tree_plans, history_zigzag, Nodes::history, LayoutKind::zigzag)->Apply(tree_sizes);

}  // namespace
}  // namespace weft
