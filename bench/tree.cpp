// What a tree costs: made of token ids or nodes, its slices, its lists.
#include "weft/tree.h"

#include <random>

#include <benchmark/benchmark.h>

namespace {

using weft::Index;

struct Sequences {
  std::vector<Index> tokens, cu_seqlens{0};
};

// Sequences of 4,096 tokens of a vocabulary of 100,000: prompts of `shared` tokens with eight answers each.
Sequences rollouts(Index count, Index shared) {
  std::mt19937_64 engine(1);
  const auto id = [&] { return static_cast<Index>(engine() % 100'000); };
  Sequences all;
  std::vector<Index> prompt(static_cast<std::size_t>(shared));
  for (Index i = 0; i < count; ++i) {
    if (i % 8 == 0)
      for (Index& token : prompt) token = id();
    all.tokens.insert(all.tokens.end(), prompt.begin(), prompt.end());
    for (Index n = shared; n < 4096; ++n) all.tokens.push_back(id());
    all.cu_seqlens.push_back(static_cast<Index>(all.tokens.size()));
  }
  return all;
}

void trie(benchmark::State& state) {
  const Sequences given = rollouts(1000, state.range(0));
  Index rows = 0;
  for (auto _ : state) rows = weft::Tree::from_sequences(given.tokens, given.cu_seqlens).rows();
  state.counters["rows"] = static_cast<double>(rows);
  state.counters["tokens"] = static_cast<double>(given.tokens.size());
}
BENCHMARK(trie)->Arg(0)->Arg(2048)->Arg(4000)->Unit(benchmark::kMillisecond);

void edges_of_tokens(benchmark::State& state) {
  const Sequences given = rollouts(1000, state.range(0));
  const weft::Tree tree = weft::Tree::from_sequences(given.tokens, given.cu_seqlens);
  for (auto _ : state) benchmark::DoNotOptimize(tree.edge_of_token().data());
}
BENCHMARK(edges_of_tokens)->Arg(2048)->Unit(benchmark::kMillisecond);

// A binary tree of 10,000 nodes of 64 tokens, without a window (-1) or with one.
void slices(benchmark::State& state) {
  std::vector<Index> parents, lengths(10'000, 64);
  for (Index i = 0; i < 10'000; ++i) parents.push_back(i == 0 ? -1 : (i - 1) / 2);
  const weft::Tree tree = weft::Tree::from_nodes({.parents = parents, .lengths = lengths});
  std::size_t count = 0;
  for (auto _ : state) count = tree.slices({.causal = true, .left = state.range(0)}).size();
  state.counters["slices"] = static_cast<double>(count);
}
BENCHMARK(slices)->Arg(-1)->Arg(128)->Arg(512)->Unit(benchmark::kMillisecond);

void of_nodes(benchmark::State& state) {
  std::vector<Index> parents, lengths(10'000, 64);
  for (Index i = 0; i < 10'000; ++i) parents.push_back(i == 0 ? -1 : (i - 1) / 2);
  for (auto _ : state)
    benchmark::DoNotOptimize(weft::Tree::from_nodes({.parents = parents, .lengths = lengths}).problem());
}
BENCHMARK(of_nodes)->Unit(benchmark::kMillisecond);

}  // namespace
