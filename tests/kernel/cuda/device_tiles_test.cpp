// The lists that the device makes for cuda.sm90, against what they have to be, stated row by row: where tiles end, the
// slices of each, the items and their order.
#include "kernel/cuda/gpu_problem.h"

#ifdef WEFT_WITH_SM90
#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <string>

#include "cuda/device_array.h"
#include "index.h"
#include "kernel/cuda/sm90/lists/device_tiles.h"
#include "plan/cuda/host_plan.h"
#include "refusal.h"

namespace weft::cuda::sm90 {
namespace {

using test::Random;

template <class T>
std::vector<T> read(const T* from, std::size_t n) {
  std::vector<T> out(n);
  if (n > 0) expect_ok(cudaMemcpy(out.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost));
  return out;
}
int read_one(const int* from) { return read(from, 1)[0]; }

bool same(const WorkSlice& a, const WorkSlice& b) { return std::memcmp(&a, &b, sizeof(a)) == 0; }

// One side's rows of the slices that show something, as the device sees them.
struct SideRows {
  SideRows(const std::vector<Slice>& of, bool of_keys, Index row_count)
      : keys(of_keys), rows(static_cast<int>(row_count)), held(at(row_count), false), joined(at(row_count), false) {
    for (const Slice& s : of) {
      const WorkSlice w = work_slice(s);
      if (w.q_begin >= w.q_end) continue;
      slices.push_back(w);
      for (int row = begin(w); row < end(w); ++row) {
        held[at(row)] = true;
        if (row > begin(w)) joined[at(row)] = true;
      }
    }
    for (int row = 0; row < rows; ++row)
      if (row == 0 || (!joined[at(row)] && (held[at(row)] || held[at(row - 1)]))) runs.push_back({row, row});
    for (std::size_t n = 0; n < runs.size(); ++n) runs[n].end = n + 1 < runs.size() ? runs[n + 1].begin : rows;
  }
  int begin(const WorkSlice& s) const { return keys ? s.k_begin : s.q_begin; }
  int end(const WorkSlice& s) const { return keys ? s.k_end : s.q_end; }
  const Range& run_of(int row) const {
    return *std::find_if(runs.begin(), runs.end(), [&](const Range& r) { return row >= r.begin && row < r.end; });
  }
  std::vector<WorkSlice> touching(int from, int to) const {
    std::vector<WorkSlice> all;
    for (const WorkSlice& s : slices)
      if (begin(s) < to && end(s) > from) all.push_back(s);
    return all;
  }
  // What rows [from, to) meet on the other side.
  Index cost(int from, int to) const {
    Index sum = 0;
    for (const WorkSlice& s : touching(from, to)) {
      Slice cut{s.q_begin, s.q_end, s.k_begin, s.k_end, s.lo, s.hi};
      (keys ? cut.k_begin : cut.q_begin) = max_of(begin(s), from);
      (keys ? cut.k_end : cut.q_end) = min_of(end(s), to);
      const Slice t = trimmed(cut, true);
      if (t.q_begin < t.q_end) sum += keys ? t.q_end - t.q_begin : t.k_end - t.k_begin;
    }
    return sum;
  }
  // Tiles of each run from its begin on.
  std::vector<Range> tiles(int size) const {
    std::vector<Range> all;
    for (const Range& run : runs)
      for (Index row = run.begin; row < run.end; row += size) all.push_back({row, min_of(row + size, run.end)});
    return all;
  }

  bool keys;
  int rows;
  std::vector<bool> held, joined;
  std::vector<WorkSlice> slices;
  std::vector<Range> runs;
};

// Runs in the order of their most expensive tile, to a quarter of a power of two.
void expect_order(const std::vector<Index>& most) {
  for (std::size_t n = 1; n < most.size(); ++n)
    ASSERT_LE(static_cast<double>(most[n]), 1.25 * static_cast<double>(most[n - 1])) << "item " << n;
}

void expect_forward(const DeviceForwardTiles& made, const SideRows& side, int size) {
  const int count = read_one(made.tiles.count);
  ASSERT_LE(count, made.tiles.most);
  ASSERT_EQ(read(made.counters, 3), std::vector<int>(3, 0));
  const std::vector<ForwardItem> items = read(made.tiles.items, at(count));
  std::vector<const ForwardItem*> tiles(at(count), nullptr);
  int entries = 0;
  for (const ForwardItem& i : items) {
    ASSERT_TRUE(i.tile >= 0 && i.tile < count && tiles[at(i.tile)] == nullptr) << "tile " << i.tile;
    tiles[at(i.tile)] = &i;
    entries = std::max(entries, i.last);
  }
  const std::vector<WorkSlice> slices = read(made.tiles.slices, at(entries));
  std::vector<Index> cost(at(count)), most;
  int row = 0;
  for (const ForwardItem* i : tiles) {
    ASSERT_EQ(i->begin, row);
    ASSERT_TRUE(i->end > i->begin && i->end - i->begin <= size) << i->begin << " to " << i->end;
    row = i->end;
    ASSERT_EQ(i->ends, 0);
    const Range first = side.run_of(i->begin), last = side.run_of(i->end - 1);
    if (first.begin == last.begin && first.size() > size) {  // a run's tiles are full but for the first
      ASSERT_EQ((first.end - i->end) % size, 0);
      ASSERT_TRUE(i->begin == first.begin || i->end - i->begin == size);
    } else {  // whole runs
      ASSERT_EQ(i->begin, first.begin);
      ASSERT_EQ(i->end, last.end);
    }
    const std::vector<WorkSlice> want = side.touching(i->begin, i->end);
    ASSERT_EQ(at(i->last - i->first), want.size()) << "rows " << i->begin << " to " << i->end;
    for (std::size_t n = 0; n < want.size(); ++n) ASSERT_TRUE(same(slices[at(i->first) + n], want[n]));
    ASSERT_TRUE(want.empty() || same(i->slice, want[0]));
    cost[at(i->tile)] = side.cost(i->begin, i->end);
  }
  ASSERT_EQ(row, side.rows);
  for (const ForwardItem& i : items) {
    const Range run = side.run_of(i.begin);
    Index of_run = cost[at(i.tile)];
    if (run.size() > size)
      for (const ForwardItem* other : tiles)
        if (other->begin >= run.begin && other->end <= run.end) of_run = max_of(of_run, cost[at(other->tile)]);
    most.push_back(of_run);
  }
  expect_order(most);
}

int tile_with(const std::vector<Range>& tiles, int row) {
  return static_cast<int>(std::find_if(tiles.begin(), tiles.end(), [&](const Range& t) { return row < t.end; }) -
                          tiles.begin());
}

void expect_keys(const DeviceBackwardTiles& made, const SideRows& keys, const std::vector<Range>& rows,
                 const BackwardSizes& sizes) {
  const int active = read_one(made.keys.count);
  std::vector<int2> unseen = read(made.unseen, at(made.keys.most));
  while (!unseen.empty() && unseen.back().x == 0 && unseen.back().y == 0) unseen.pop_back();
  const int gaps = static_cast<int>(unseen.size());
  ASSERT_LE(active + gaps, made.keys.most);
  const std::vector<int4> items = read(made.keys.items, at(active));
  const std::vector<Range> tiles = keys.tiles(sizes.keys);
  ASSERT_EQ(tiles.size(), at(active + gaps));
  int entries = 0;
  for (const int4& i : items) entries = std::max(entries, i.w);
  const std::vector<WorkSlice> slices = read(made.keys.slices, at(entries));
  std::vector<bool> seen(tiles.size(), false);
  const auto claim = [&](int begin, int end) {
    const auto t = at(tile_with(tiles, begin));
    ASSERT_LT(t, tiles.size());
    ASSERT_FALSE(seen[t]);
    seen[t] = true;
    ASSERT_EQ(tiles[t].begin, begin);
    ASSERT_EQ(tiles[t].end, end);
  };
  std::vector<Index> most;
  for (const int4& i : items) {
    claim(i.x, i.y);
    const std::vector<WorkSlice> want = keys.touching(i.x, i.y);
    ASSERT_FALSE(want.empty());
    ASSERT_EQ(at(i.w - i.z), want.size());
    for (std::size_t n = 0; n < want.size(); ++n) {
      WorkSlice s = slices[at(i.z) + n];
      for (int row = s.q_begin; row < s.q_end; row += (row + 1 < s.q_end && row % 7 == 0 ? 1 : s.q_end - row)) {
        const int t = (row + s.tile_shift) >> sizes.log2_size;
        ASSERT_EQ(t, tile_with(rows, row)) << "row " << row;
        ASSERT_EQ((t << sizes.log2_size) - s.tile_shift, rows[at(t)].begin);
      }
      const int last = s.q_end - 1;
      ASSERT_EQ((last + s.tile_shift) >> sizes.log2_size, tile_with(rows, last));
      s.tile_shift = 0;
      ASSERT_TRUE(same(s, want[n]));
    }
    const Range run = keys.run_of(i.x);
    Index of_run = 0;
    for (const Range& t : tiles)
      if (t.begin >= run.begin && t.end <= run.end)
        of_run = max_of(of_run, keys.cost(static_cast<int>(t.begin), static_cast<int>(t.end)));
    most.push_back(of_run);
  }
  expect_order(most);
  for (const int2& r : unseen) {
    claim(r.x, r.y);
    ASSERT_FALSE(keys.held[at(r.x)]);
  }
}

void expect_dq(const DeviceBackwardTiles& made, const SideRows& side, const std::vector<Range>& rows,
               const BackwardSizes& sizes) {
  const int count = read_one(made.dq.count);
  ASSERT_LE(count, made.dq.most);
  const std::vector<Range> tiles = side.tiles(sizes.dq_tiles << sizes.log2_size);
  ASSERT_EQ(tiles.size(), at(count));
  const std::vector<DqItem> items = read(made.dq.items, at(count));
  int entries = 0;
  for (const DqItem& i : items) entries = std::max(entries, i.last);
  const std::vector<WorkSlice> slices = read(made.dq.slices, at(entries));
  std::vector<bool> seen(tiles.size(), false);
  for (const DqItem& i : items) {
    const auto t = at(tile_with(tiles, i.begin));
    ASSERT_FALSE(seen.at(t));
    seen[t] = true;
    ASSERT_EQ(tiles[t].begin, i.begin);
    ASSERT_EQ(tiles[t].end, i.end);
    ASSERT_EQ(rows.at(at(i.tile)).begin, i.begin);
    const std::vector<WorkSlice> want = side.touching(i.begin, i.end);
    ASSERT_EQ(at(i.last - i.first), want.size());
    for (std::size_t n = 0; n < want.size(); ++n) ASSERT_TRUE(same(slices[at(i.first) + n], want[n]));
  }
}

void expect_backward(const DeviceBackwardTiles& made, const SideRows& queries, const SideRows& keys,
                     const BackwardSizes& sizes) {
  const std::vector<Range> rows = queries.tiles(1 << sizes.log2_size);
  ASSERT_EQ(at(read_one(made.row_count)), rows.size());
  ASSERT_LE(rows.size(), at(made.most_rows));
  const std::vector<int2> ranges = read(made.rows, rows.size());
  for (std::size_t t = 0; t < rows.size(); ++t) {
    ASSERT_EQ(ranges[t].x, rows[t].begin);
    ASSERT_EQ(ranges[t].y, queries.held[at(rows[t].begin)] ? rows[t].end : ~rows[t].end) << "tile " << t;
  }
  expect_keys(made, keys, rows, sizes);
  if (sizes.dq_tiles > 0) expect_dq(made, queries, rows, sizes);
}

constexpr HeadGroups kHeads{2, 1, {}};

// All lists of a plan that is there, with tiles of several sizes.
void expect_lists(DevicePlan& plan, const std::vector<Slice>& slices, Random& random) {
  const SideRows queries(slices, false, plan.slices().q_rows), keys(slices, true, plan.slices().k_rows);
  for (const int size : {static_cast<int>(random.index(1, 12)), static_cast<int>(random.index(8, 192)), 32, 128}) {
    SCOPED_TRACE("forward, tiles of " + std::to_string(size));
    expect_forward(build_forward_tiles(plan, size, kHeads, 3, nullptr), queries, size);
    if (testing::Test::HasFatalFailure()) return;
  }
  for (const int dq_tiles : {0, 1, 2}) {
    const BackwardSizes sizes{static_cast<int>(random.index(2, 6)), std::array{64, 128, 192}[at(random.index(0, 2))],
                              dq_tiles};
    SCOPED_TRACE("backward, tiles of " + std::to_string(1 << sizes.log2_size) + " rows and " +
                 std::to_string(sizes.keys) + " keys");
    expect_backward(build_backward_tiles(plan, sizes, kHeads, nullptr), queries, keys, sizes);
    if (testing::Test::HasFatalFailure()) return;
  }
}

// Slices as no planner makes them: in any order, over each other, empty, with rows that see nothing.
std::vector<Slice> any_slices(Random& random, Index q_rows, Index k_rows) {
  std::vector<Slice> slices;
  const Index longest = random.chance(0.3) ? 20 : random.chance(0.5) ? 200 : 2000;
  for (Index n = random.index(0, 60); n > 0; --n) {
    const Index q = random.index(0, q_rows), k = random.index(0, k_rows);
    Slice s{q, min_of(q_rows, q + random.index(0, longest)), k, min_of(k_rows, k + random.index(0, longest))};
    if (random.chance(0.4)) s.hi = k - q + random.index(-20, 300);
    if (random.chance(0.3)) s.lo = k - q - random.index(-20, 300);
    slices.push_back(s);
  }
  return slices;
}
// Documents one after another, with padding and rows of other sizes on the key side.
std::vector<Slice> documents(Random& random, Index q_rows, Index k_rows) {
  std::vector<Slice> slices;
  const Index longest = random.chance(0.5) ? 40 : random.chance(0.5) ? 3 : 900;
  const bool cross = random.chance(0.3);
  Index q = random.chance(0.3) ? random.index(0, 100) : 0, k = q;
  while (true) {
    const Index rows = random.index(random.chance(0.1) ? 0 : 1, longest);
    const Index keys = cross ? random.index(0, longest) : rows;
    if (q + rows > q_rows || k + keys > k_rows) return slices;
    Slice s{q, q + rows, k, k + keys};
    if (random.chance(0.8)) s.hi = k - q;
    if (random.chance(0.2)) s.lo = k - q - random.index(0, 50);
    if (random.chance(0.2) && keys > 1) {  // keys in two parts
      Slice first = s;
      first.k_end = s.k_begin = k + keys / 2;
      slices.push_back(first);
    }
    slices.push_back(s);
    q += rows + (random.chance(0.1) ? random.index(0, 150) : 0);
    k += keys + (random.chance(0.1) ? random.index(0, 150) : 0);
  }
}

TEST(DeviceTiles, OfUploadedSlices) {
  DeviceContext context(gpu());
  Random random(401);
  for (unsigned long long n = 0; n < random_problems(120); ++n) {
    SCOPED_TRACE("round " + std::to_string(n));
    const Index q_rows = random.index(1, random.chance(0.3) ? 70 : 3000), k_rows = random.index(1, 3000);
    const std::vector<Slice> slices =
        random.chance(0.5) ? any_slices(random, q_rows, k_rows) : documents(random, q_rows, k_rows);
    DevicePlan plan(context, static_cast<Index>(slices.size()) + random.index(0, 9));
    plan.upload({slices, q_rows, k_rows});
    expect_lists(plan, plan.download(), random);
    ASSERT_NO_THROW(context.check());
    if (HasFatalFailure()) return;
  }
}

// Planned on the device: there are no more tiles than the arguments promise.
TEST(DeviceTiles, OfPlans) {
  DeviceContext context(gpu());
  Random random(402);
  for (unsigned long long seed = 0; seed < random_problems(400); ++seed) {
    check::RandomChoices choices(seed);
    const auto kind = static_cast<LayoutKind>(seed % 4);
    const check::Case c = random_case(choices, kind);
    if (c.mask.slices) continue;
    SCOPED_TRACE(flags(c));
    const Problem p = problem_of(c);
    const Layouts l = layouts_of(c, p);
    const DeviceOffsets q(c.q, p.packing().q(), false, 0), k(c.k ? *c.k : c.q, p.packing().k(), false, 0);
    const DeviceLayout dq{kind, c.ranks, l.q.rows()}, dk{kind, c.ranks, l.k.rows()};
    const Index rank = choices.pick(0, c.ranks - 1);
    const DeviceRuns keys = kind != LayoutKind::striped && choices.one_in(3) ? DeviceLayout::sequence_order()
                            : choices.one_in(3)                              ? dk.runs(choices.pick(0, c.ranks - 1))
                                                                             : dk.rank_order();
    const DevicePlanArgs args{q.stream(), k.stream(), c.mask, dq.runs(rank), keys};
    DevicePlan plan(context, device_plan_capacity(args));
    plan.plan(args);
    expect_lists(plan, plan.download(), random);
    ASSERT_NO_THROW(context.check());
    if (HasFatalFailure()) return;
  }
}

// More words of rows than threads, many tiles and slices, and a long one over all.
TEST(DeviceTiles, ManyRows) {
  DeviceContext context(gpu());
  Random random(403);
  for (const bool connected : {false, true}) {
    const Index rows = 150000;
    Plan host{{}, rows, rows};
    for (Index row = 0; row < rows;) {
      const Index end = min_of(rows, row + random.index(1, 300));
      host.slices.push_back({row, end, row, end, -kUnlimited, 0});
      row = end;
    }
    if (connected) host.slices.push_back({1000, 140000, 70000, 100000});
    const auto count = static_cast<Index>(host.slices.size());
    DevicePlan plan(context, count);
    plan.upload(host);
    const SideRows queries(host.slices, false, rows);
    const DeviceForwardTiles forward = build_forward_tiles(plan, 128, kHeads, 1, nullptr);
    const int tiles = read_one(forward.tiles.count);
    std::vector<ForwardItem> items = read(forward.tiles.items, at(tiles));
    std::sort(items.begin(), items.end(), [](const auto& a, const auto& b) { return a.tile < b.tile; });
    int row = 0, entries = 0;
    for (const ForwardItem& i : items) {
      ASSERT_EQ(i.begin, row);
      row = i.end;
      entries += i.last - i.first;
    }
    ASSERT_EQ(row, rows);
    Index want = 0;  // slices and the tiles that each touches
    for (const WorkSlice& s : queries.slices)
      for (const ForwardItem& i : items) want += s.q_begin < i.end && s.q_end > i.begin ? 1 : 0;
    EXPECT_EQ(entries, want);
    const DeviceBackwardTiles backward = build_backward_tiles(plan, {6, 128, 2}, kHeads, nullptr);
    const std::vector<Range> expected = queries.tiles(64);
    ASSERT_EQ(at(read_one(backward.row_count)), expected.size());
    const std::vector<int2> ranges = read(backward.rows, expected.size());
    for (std::size_t t = 0; t < expected.size(); ++t) {
      ASSERT_EQ(ranges[t].x, expected[t].begin);
      ASSERT_EQ(ranges[t].y, expected[t].end);
    }
    EXPECT_NO_THROW(context.check());
  }
}

// Two plans under a graph whose memory was made for the first: one with more slices over a row than fit is a fault, and
// no tile has any.
TEST(DeviceTiles, TooManySlicesAreReported) {
  const TestStream stream;
  DeviceContext context(gpu(stream.stream));
  DevicePlan plan(context, 3);
  plan.upload({{{0, 8, 0, 8}, {8, 16, 8, 16}}, 16, 16});
  DeviceArray<int> counts(2);
  DeviceArray<ForwardItem> items(4);
  stream.wait();
  const auto lists = [&] {
    const DeviceForwardTiles forward = build_forward_tiles(plan, 4, kHeads, 0, stream.stream);
    const DeviceBackwardTiles backward = build_backward_tiles(plan, {2, 64, 2}, kHeads, stream.stream);
    const auto copy = [&](void* to, const void* from, std::size_t bytes) {
      expect_ok(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream.stream));
    };
    copy(counts.get(), forward.tiles.count, sizeof(int));
    copy(counts.get() + 1, backward.keys.count, sizeof(int));
    copy(items.get(), forward.tiles.items, 4 * sizeof(ForwardItem));
  };
  const cudaGraphExec_t graph = capture(stream.stream, lists);
  expect_ok(cudaGraphLaunch(graph, stream.stream));
  stream.wait();
  EXPECT_EQ(counts.host(), (std::vector<int>{4, 2}));
  for (int n = 0; n < 4; ++n) EXPECT_EQ(items.host()[at(n)].last - items.host()[at(n)].first, 1);
  EXPECT_NO_THROW(context.check());
  plan.upload({{{0, 16, 0, 4}, {0, 16, 4, 8}, {0, 16, 8, 12}}, 16, 16});
  expect_ok(cudaGraphLaunch(graph, stream.stream));
  stream.wait();
  EXPECT_EQ(counts.host()[0], 4);
  for (int n = 0; n < 4; ++n) EXPECT_EQ(items.host()[at(n)].last, items.host()[at(n)].first);
  expect_refusal([&] { context.check(); }, {"12 slices, entries or tiles do not fit the room for 6"});
  cudaGraphExecDestroy(graph);
}

}  // namespace
}  // namespace weft::cuda::sm90
#endif
