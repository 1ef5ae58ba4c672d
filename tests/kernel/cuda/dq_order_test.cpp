// dQ in turn (cuda.sm90, `deterministic`): the turns as the host numbers them, and gradients against the dense formula
// where tiles are visited often, by more items than there are blocks. The same bits on every run.
#include "kernel/cuda/gpu_problem.h"

#ifdef WEFT_WITH_SM90
#include <numeric>

#include "index.h"
#include "kernel/cuda/sm90/backward/dq_order.h"
#include "kernel/cuda/sm90/backward/work.h"

namespace weft::cuda::sm90 {
namespace {

// Items of 128 keys, each with random slices; tiles of 64 rows.
TEST(Turns, EachVisitComesAfterAllBeforeIt) {
  test::Random random(71);
  constexpr int kTiles = 40, kLog = 6;
  for (int round = 0; round < 50; ++round) {
    std::vector<int> items;
    std::vector<WorkSlice> slices;
    for (int i = 0, count = static_cast<int>(random.index(1, 30)); i < count; ++i) {
      const int begin = 128 * static_cast<int>(random.index(0, 15)), first = static_cast<int>(slices.size());
      for (Index n = random.index(1, 6); n > 0; --n) {
        const int shift = 64 * static_cast<int>(random.index(0, 4)) - static_cast<int>(random.index(0, 63));
        const int q = static_cast<int>(random.index(70, 1000)), k = static_cast<int>(random.index(0, 1900));
        slices.push_back({q, q + static_cast<int>(random.index(1, 1000)), k, k + static_cast<int>(random.index(1, 600)),
                          k, -static_cast<int>(random.index(0, 900)), static_cast<int>(random.index(0, 900)), shift});
      }
      items.insert(items.end(),
                   {begin, begin + static_cast<int>(random.index(1, 128)), first, static_cast<int>(slices.size())});
    }
    const std::vector<int> turns = number_additions(items, slices, kLog, kTiles);
    std::vector<int> additions(kTiles, 0);
    std::size_t visits = 0;
    for (std::size_t i = 0; i < items.size(); i += 4)
      for (int m = items[i + 2]; m < items[i + 3]; ++m) {
        const WorkSlice& s = slices[at(m)];
        // Every row that sees a key of the item lies in a tile that is visited, and its first and last tiles have one.
        const TileRange seen = tiles_seeing(s, items[i], items[i + 1], kLog);
        int first = kTiles, last = -1;
        for (int row = s.q_begin; row < s.q_end; ++row) {
          const int from = std::max({s.k_begin, items[i], row + s.lo}),
                    to = std::min({s.k_end - 1, items[i + 1] - 1, row + s.hi});
          if (from > to) continue;
          first = std::min(first, (row + s.tile_shift) >> kLog);
          last = std::max(last, (row + s.tile_shift) >> kLog);
        }
        if (last < 0) {
          EXPECT_GT(seen.first, seen.last);
          continue;
        }
        ASSERT_EQ(seen.first, first);
        ASSERT_EQ(seen.last, last);
        for (int t = seen.last; t >= seen.first; --t, ++visits)
          ASSERT_EQ(turns.at(at(s.k_first + t)), additions.at(at(t))++);
      }
    EXPECT_EQ(turns.size(), visits);
  }
}

// Nothing twice, nothing left out; items of a head in one order, those of a part as they were, others between them.
TEST(Turns, ItemsOfAHeadKeepTheirOrder) {
  test::Random random(72);
  for (int round = 0; round < 100; ++round) {
    const Index heads = random.index(1, 6);
    std::vector<ComponentItems> parts;
    std::vector<int> part_of;  // of a tile; tiles are numbered in the order of parts
    for (Index n = random.index(1, 9); n > 0; --n) {
      const int begin = static_cast<int>(part_of.size()), count = static_cast<int>(random.index(1, 20));
      parts.push_back({begin, begin + count, random.index(1, random.chance(0.5) ? 3 : 40)});
      part_of.insert(part_of.end(), at(count), static_cast<int>(parts.size()) - 1);
    }
    const std::vector<ComponentItems> given = parts;
    std::vector<int> tiles(part_of.size());
    std::iota(tiles.begin(), tiles.end(), 0);
    tiles = spread_components(tiles, parts, heads);
    std::vector<int> next(given.size());
    for (std::size_t p = 0; p < given.size(); ++p) next[p] = given[p].begin;
    for (const int t : tiles) ASSERT_EQ(t, next.at(at(part_of.at(at(t))))++);
    ASSERT_EQ(tiles.size(), part_of.size());
    const std::vector<int> order = order_for_ordered_dq(parts, heads);
    ASSERT_EQ(order.size(), tiles.size() * at(heads));
    const int count = static_cast<int>(tiles.size());
    std::vector<int> of_head(at(heads), 0);
    for (const int item : order) ASSERT_EQ(item % count, of_head.at(at(item / count))++);
  }
  std::vector<ComponentItems> two = {{0, 3, 4}, {3, 5, 4}};
  EXPECT_EQ(spread_components({10, 11, 12, 20, 21}, two, 2), (std::vector<int>{10, 20, 11, 21, 12}));
  ASSERT_EQ(two.size(), 1u);
  EXPECT_EQ(order_for_ordered_dq({{0, 2, 1}, {2, 3, 2}}, 2), (std::vector<int>{0, 1, 3, 4, 2, 5}));
}

// Parts of a tile together show what the tile shows, each pair once, and none is much longer than asked.
TEST(Turns, LongTilesAreDividedAmongItems) {
  test::Random random(76);
  int divided = 0;
  for (int round = 0; round < 200; ++round) {
    const int log2_size = static_cast<int>(random.index(0, 4)), size = 1 << log2_size;
    KeyItems given;
    given.begin.push_back(0);
    const auto add_slice = [&](int key, int end) {
      const int q = static_cast<int>(random.index(0, 200)),
                k = static_cast<int>(random.index(max_of(0, key - 9), end - 1));
      const int shift = static_cast<int>(random.index(0, 40)), hi = static_cast<int>(random.index(-30, 60));
      given.members.push_back({q, q + static_cast<int>(random.index(1, 150)), k,
                               k + static_cast<int>(random.index(1, 20)), k,
                               random.chance(0.5) ? -10000 : hi - static_cast<int>(random.index(0, 40)),
                               random.chance(0.5) ? 10000 : hi, shift});
      const WorkSlice& s = given.members.back();
      const int first = std::max(key, s.k_begin), last = std::min(end, s.k_end) - 1;
      if (first > last) return Index{0};
      return max_of(0, min_of(s.q_end, last - s.lo + 1) - max_of(s.q_begin, first - s.hi));
    };
    for (int t = 0; t < 5; ++t) {
      const int key = 16 * t, end = key + static_cast<int>(random.index(1, 16));
      Index cost = 0;
      for (Index n = random.index(0, 4); n > 0; --n) cost += add_slice(key, end);
      given.ranges.insert(given.ranges.end(), {key, end});
      given.component.push_back(t);
      given.cost.push_back(cost);
      given.begin.push_back(static_cast<int>(given.members.size()));
    }
    const Index most = random.index(20, 200);
    KeyItems made = given;
    split_long_tiles(made, most, log2_size);
    ASSERT_EQ(made.begin.size(), made.tiles() + 1);
    ASSERT_EQ(made.ranges.size(), 2 * made.tiles());
    std::size_t of = 0;  // the tile that was given
    int part = 0;
    std::vector<int> seen;  // by row and key of the tile
    const auto count = [&](const KeyItems& items, std::size_t t, int sign) {
      for (int m = items.begin[t]; m < items.begin[t + 1]; ++m) {
        const WorkSlice& s = items.members[at(m)];
        for (int q = s.q_begin; q < s.q_end; ++q)
          for (int k = std::max(s.k_begin, items.ranges[2 * t]); k < std::min(s.k_end, items.ranges[2 * t + 1]); ++k)
            if (k - q >= s.lo && k - q <= s.hi) seen.at(at(q * 16 + k - items.ranges[2 * t])) += sign;
      }
    };
    for (std::size_t t = 0; t < made.tiles(); ++of) {
      seen.assign(400 * 16, 0);
      count(given, of, 1);
      const std::size_t first = t;
      for (; t < made.tiles() && made.ranges[2 * t] == given.ranges[2 * of]; ++t) {
        count(made, t, -1);
        const bool whole = given.cost[of] <= most;
        ASSERT_EQ(made.component[t], given.component[of]);
        ASSERT_LE(made.cost[t], whole ? most : most + 6 * size)
            << "rounded to tiles, and one more at each slice's ends";
        if (!made.parts.empty() && made.begin[t] < made.begin[t + 1]) {
          ASSERT_EQ(made.parts.at(at(made.begin[t])), whole ? -1 : part++);
        }
      }
      ASSERT_EQ(seen, std::vector<int>(400 * 16, 0)) << round;
      divided += t - first > 1;
    }
    ASSERT_EQ(of, given.tiles());
    ASSERT_EQ(part, made.part_count());
  }
  EXPECT_GT(divided, 100);
}

// Nodes of a subtree of few rows make a group, each of many rows is one by itself, and documents stay apart.
TEST(Turns, NodesOfASubtreeAreGrouped) {
  const std::pair<int, int> rows[] = {{0, 100}, {10, 55},  {20, 55},   {55, 100},
                                      {60, 80}, {80, 100}, {200, 240}, {240, 250}};
  std::vector<WorkSlice> slices;
  Cut keys;
  for (const auto& [begin, end] : rows) {
    keys.component_of.push_back(static_cast<int>(slices.size()));
    slices.push_back({begin, end, begin, begin + 1, begin, -100, 0});
    keys.components.push_back({begin, begin + 1, 0});
  }
  slices.push_back({215, 235, 200, 201, 200, -100, 0});  // a second slice of the document's keys
  keys.component_of.push_back(6);
  EXPECT_EQ(group_components(slices, keys, 50), (std::vector<int>{0, 1, 1, 3, 3, 3, 6, 7}));
  EXPECT_EQ(group_components(slices, keys, 100), (std::vector<int>{0, 0, 0, 0, 0, 0, 6, 7}));
  EXPECT_EQ(group_components(slices, keys, 1), (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}));
}

}  // namespace
}  // namespace weft::cuda::sm90
#endif

namespace weft::test {
namespace {

class GpuDqOrder : public GpuTest {
 protected:
  static void expect_close(const Buffer& got, const Buffer& want) {
    const std::vector<double> a = got.values(), b = want.values();
    double most = 0;
    for (const double x : b) most = std::max(most, std::abs(x));
    for (std::size_t i = 0; i < a.size(); ++i)
      ASSERT_NEAR(a[i], b[i], 4 * check::rounding(want.view().dtype).of(b[i]) + 1e-5 * most) << i;
  }
  static void expect_same_twenty_times(const KernelProblem& problem, const Outputs& first) {
    OnDevice gpu(gpu_kernel);
    KernelBackwardArgs args = gpu.bind(first.backward_args(problem));
    args.deterministic = true;
    const auto run = [&] {
      attend_backward(args, gpu_kernel);
      std::vector<std::vector<char>> bytes;
      for (const TensorView& view : {args.dq, args.dk, args.dv}) {
        bytes.emplace_back(spanned_bytes(view));
        WEFT_CUDA(cudaMemcpyAsync(bytes.back().data(), view.data, bytes.back().size(), cudaMemcpyDeviceToHost,
                                  static_cast<cudaStream_t>(args.place.stream)));
      }
      WEFT_CUDA(cudaStreamSynchronize(static_cast<cudaStream_t>(args.place.stream)));
      return bytes;
    };
    const auto want = run();
    for (int i = 1; i < 20; ++i) ASSERT_TRUE(run() == want) << "run " << i;
    const std::vector<std::uint64_t> before = bits(first.backward.dq);
    gpu.finish();
    EXPECT_EQ(bits(first.backward.dq), before);
  }
  static void expect_right_and_the_same(const KernelProblem& problem) {
    const Outputs got(problem.p);
    gpu_run(got, problem, Pass::backward, true);
    Judge judge(dtype(), false);
    judge.backward(got.backward, expected_of(problem, Pass::backward), problem.p);
    expect_same_twenty_times(problem, got);
  }
};
WEFT_FOR_SM90(GpuDqOrder);

// Slices of few rows and few keys, side by side: a tile is visited up to sixteen times by one item.
TEST_P(GpuDqOrder, ManySlicesOfATile) {
  Random random(73);
  for (const Index dim : {64, 128}) {
    for (const int kind : {0, 1, 2}) {
      SCOPED_TRACE(testing::Message() << dim << ", " << kind);
      KernelProblem problem{"", {.tq = 210, .tk = 400, .hq = 6, .hk = 2, .dqk = dim, .dv = dim, .dtype = dtype()}};
      AttentionProblem& p = problem.p;
      if (kind == 1) problem.head_map = {1, 0, 1, 1, 0, 1};
      if (kind == 1) p.softcap = 3;
      if (kind == 2) p.hk = 6, p.sink = Sink::Kind::learnable;
      for (Index q = 0; q < 200; q += 20)
        for (Index k = 0; k < 390; k += 50)
          if (random.chance(0.8)) p.slices.push_back({q, q + 20, k, min_of(k + 50, 390), -kUnlimited, q + 130 - k / 4});
      p.fill(random);
      expect_right_and_the_same(problem);
    }
  }
}

// One tile of dQ, and more tiles of keys than a GPU has multiprocessors.
TEST_P(GpuDqOrder, MoreItemsThanBlocks) {
  for (const Index dim : {64, 128}) {
    SCOPED_TRACE(dim);
    expect_right_and_the_same(
        make_problem({.tq = 20, .tk = 17500, .hq = 2, .hk = 1, .dqk = dim, .dv = dim, .dtype = dtype()},
                     {{0, 18, 3, 17490, -kUnlimited, 17480}}, 74));
  }
}

// Several waves of items of all lengths, too many for the dense formula: as without `deterministic`, but for rounding.
TEST_P(GpuDqOrder, ManyItems) {
  const std::vector<Index> lengths_of = {1500, 200, 70, 600, 1};
  // Three heads do not become rows of one tile.
  const std::pair<Index, Mask> cases[] = {{64, {.causal = true}},
                                          {64, {.left = 300, .right = 20}},
                                          {128, {.causal = true}},
                                          {128, {}},
                                          {128, {.causal = true, .left = 300}},
                                          {128, {.causal = true, .chunk = 400}}};
  for (const auto& [dim, mask] : cases) {
    SCOPED_TRACE(testing::Message() << dim << ", " << mask.causal << " " << mask.left << " " << mask.chunk.value_or(0));
    const KernelProblem problem = make_problem({.hq = 24, .hk = 8, .dqk = dim, .dv = dim, .dtype = dtype()},
                                               Packing(lengths(lengths_of)), mask, 75);
    const Outputs got(problem.p), any(problem.p);
    gpu_run(got, problem, Pass::backward, true);
    gpu_run(any, problem, Pass::backward, false);
    expect_close(got.backward.dq, any.backward.dq);
    expect_close(got.backward.dk, any.backward.dk);  // the same sums, in another order of heads
    EXPECT_EQ(bits(got.backward.dsink), bits(any.backward.dsink));
    expect_same_twenty_times(problem, got);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace weft::test
