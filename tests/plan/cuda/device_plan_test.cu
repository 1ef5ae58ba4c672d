// Plans from offsets in device memory: entry by entry what make_plan gives, on thousands of random problems; wrong
// offsets; graphs; the work of each tile.
#include <algorithm>
#include <cstring>

#include "cuda/device_array.h"
#include "kernel/cuda/work/list.h"
#include "plan/cuda/host_plan.h"
#include "refusal.h"
#include "weft/device_plan.h"

namespace weft {
namespace {

using Indices = std::vector<Index>;

// Bounds beyond 32 bits saturate on the device; nothing that rows can be apart is lost.
std::vector<Slice> saturated(std::vector<Slice> slices) {
  const auto bound = [](Index b) {
    return b >= kDeviceUnlimited ? kUnlimited : b <= -kDeviceUnlimited ? -kUnlimited : b;
  };
  for (Slice& s : slices) {
    s.lo = bound(s.lo);
    s.hi = bound(s.hi);
  }
  return slices;
}

struct Sides {
  DeviceOffsets q, k;

  Sides(const check::Case& c, const Problem& p, bool wide, Index spare)
      : q(c.q, p.packing().q(), wide, spare), k(c.k ? *c.k : c.q, p.packing().k(), wide, spare) {}
};

std::vector<Slice> planned(DeviceContext& context, const DevicePlanArgs& args) {
  DevicePlan plan(context, device_plan_capacity(args));
  plan.plan(args);
  return plan.download();
}

TEST(DevicePlan, FromDeviceOffsetsEqualsTheHosts) {
  DeviceContext context(gpu());
  int compared = 0, nonempty = 0;
  for (unsigned long long seed = 0; seed < random_problems(4000); ++seed) {
    check::RandomChoices choices(seed);
    const auto kind = static_cast<LayoutKind>(seed % 4);
    const check::Case c = random_case(choices, kind);
    if (c.mask.slices) continue;
    const Problem p = problem_of(c);
    const Layouts l = layouts_of(c, p);
    const Index rank = choices.pick(0, c.ranks - 1), other = choices.pick(0, c.ranks - 1);
    const bool own_rows = choices.one_in(2);  // rows as the layout has them, or enough for all tokens
    const Sides sides(c, p, choices.one_in(2), choices.one_in(2) ? choices.pick(1, 200) : 0);
    const DeviceLayout dq{kind, c.ranks, own_rows ? l.q.rows() : 0}, dk{kind, c.ranks, own_rows ? l.k.rows() : 0};
    const Index k_rows = dk.rows != 0 ? dk.rows : rows_for(kind, p.packing().k().tokens(), c.ranks);
    struct Keys {
      RunList host;
      DeviceRuns device;
    };
    const Keys all[] = {{l.k.rank_order(), dk.rank_order()},
                        {l.k.runs(other), dk.runs(other)},
                        {l.k.sequence_order(), DeviceLayout::sequence_order()}};
    for (const Keys& keys : all) {
      if (keys.host.stride() != l.q.runs(rank).stride()) continue;
      const DevicePlanArgs args{sides.q.stream(), sides.k.stream(), c.mask, dq.runs(rank), keys.device};
      const std::vector<Slice> device = planned(context, args);
      ASSERT_NO_THROW(context.check()) << flags(c);
      ASSERT_EQ(device, saturated(host_plan(p, l.q.runs(rank), keys.host, k_rows))) << flags(c);
      if (own_rows) {
        ASSERT_EQ(device, saturated(make_plan(p, l.q.runs(rank), keys.host).slices)) << flags(c);
      }
      ++compared;
      if (!device.empty()) ++nonempty;
    }
  }
  if (random_problems(4000) == 4000) EXPECT_GT(nonempty, 5000) << compared;
}

// Several ranks' queries, as a hybrid has them; steps between ranks.
TEST(DevicePlan, UnionsOfRanks) {
  DeviceContext context(gpu());
  for (unsigned long long seed = 0; seed < random_problems(400); ++seed) {
    check::RandomChoices choices(seed);
    const auto kind = static_cast<LayoutKind>(seed % 4);
    const check::Case c = random_case(choices, kind);
    if (c.mask.slices || c.ranks % 2 != 0) continue;
    const Problem p = problem_of(c);
    const Layouts l = layouts_of(c, p);
    const Sides sides(c, p, false, 0);
    const RunList::Members q{0, c.ranks / 2, 1}, k{1, c.ranks / 2, 2};
    const DeviceLayout dq{kind, c.ranks, l.q.rows()}, dk{kind, c.ranks, l.k.rows()};
    const DevicePlanArgs args{sides.q.stream(), sides.k.stream(), c.mask, dq.rank_order(q), dk.rank_order(k)};
    EXPECT_EQ(planned(context, args), saturated(make_plan(p, l.q.rank_order(q), l.k.rank_order(k)).slices)) << flags(c);
    ASSERT_NO_THROW(context.check()) << flags(c);
  }
}

Stream documents(Index count, Index multiple) {
  Indices lengths;
  for (Index i = 0; i < count; ++i) lengths.push_back(multiple * (i * 7919 % 7));
  return Stream::from_lengths(lengths);
}

TEST(DevicePlan, ManyDocuments) {
  DeviceContext context(gpu());
  for (const Index count : {Index{4096}, Index{100000}}) {
    const Problem p(documents(count, 16), {.causal = true, .left = 100});
    const Stream& s = p.packing().q();
    const DeviceOffsets offsets(Indices(s.offsets().begin(), s.offsets().end()), {}, s.tokens(), false);
    for (const LayoutKind kind : {LayoutKind::dual_chunk, LayoutKind::zigzag, LayoutKind::striped}) {
      const Layout l = make_layouts(kind, p, 8).q;
      const DeviceLayout d{kind, 8};
      const DevicePlanArgs args{offsets.stream(), {}, p.mask(), d.runs(3), d.rank_order()};
      EXPECT_TRUE(planned(context, args) == saturated(make_plan(p, l.runs(3), l.rank_order()).slices))
          << count << name(kind);
      ASSERT_NO_THROW(context.check());
    }
  }
}

TEST(DevicePlan, UploadsAnyPlan) {
  DeviceContext context(gpu());
  const Problem p(documents(50, 3), {.causal = true});
  const Layout l = Layout::balanced(p, 4);
  const Plan host = make_plan(p, l.runs(1), l.rank_order());
  DevicePlan plan(context, static_cast<Index>(host.slices.size()));
  plan.upload(host);
  EXPECT_EQ(plan.download(), saturated(host.slices));
  EXPECT_EQ(plan.slices().k_rows, host.k_rows);
  plan.upload({});
  EXPECT_TRUE(plan.download().empty());
  DevicePlan small(context, 1);
  expect_refusal([&] { small.upload(host); }, {"does not fit"});
}

// --- Wrong offsets: no slices, and the next call says why ---

struct Wrong {
  Indices cu, padded;
  std::string says;
};

TEST(DevicePlan, WrongOffsetsAreNamed) {
  DeviceContext context(gpu());
  const Wrong all[] = {
      {{0, 8, 4, 32}, {}, "sequence 1: cu_seqlens[2] = 4 is less than cu_seqlens[1] = 8"},
      {{-8, 8, 16, 32}, {}, "sequence 0: cu_seqlens[0] = -8 is negative"},
      {{0, 8, 16, 48}, {}, "sequence 2: it ends at row 48 of a buffer of 32 rows"},
      {{0, 8, 18, 32}, {}, "sequence 1: padded length 10 is not a multiple of 2*ranks = 4; pad to 12"},
      {{0, 8, 20, 24}, {0, 8, 16, 24}, "sequence 1: 12 used tokens do not fit the 8 rows"},
      {{0, 8, 10, 12}, {0, 16, 8, 24}, "sequence 1: cu_seqlens_padded[2] = 8 is less than cu_seqlens_padded[1] = 16"},
      {{0, 8, 10, 12}, {-4, 8, 16, 24}, "sequence 0: cu_seqlens_padded[0] = -4 is negative"},
      {{0, 8, 1000000007, 1000000008}, {}, "sequence 1"},
  };
  for (const Wrong& wrong : all) {
    for (const bool wide : {false, true}) {
      const DeviceOffsets offsets(wrong.cu, wrong.padded, 32, wide);
      const DeviceLayout layout{LayoutKind::dual_chunk, 2};
      const DevicePlanArgs args{offsets.stream(), {}, {.causal = true}, layout.runs(1), layout.rank_order()};
      DevicePlan plan(context, device_plan_capacity(args));
      plan.plan(args);
      EXPECT_TRUE(plan.download().empty());
      expect_refusal([&] { context.check(); }, {wrong.says, "queries"});
      EXPECT_NO_THROW(context.check());
      const DeviceOffsets right({0, 8, 16, 32}, {}, 32, wide);
      const DevicePlanArgs again{right.stream(), {}, {.causal = true}, layout.runs(1), layout.rank_order()};
      plan.plan(again);
      EXPECT_FALSE(plan.download().empty());
      EXPECT_NO_THROW(context.check());
      plan.plan(args);
      expect_ok(cudaDeviceSynchronize());
      expect_refusal([&] { plan.plan(again); }, {wrong.says});
    }
  }
}

TEST(DevicePlan, HostileOffsetsTouchNothing) {
  DeviceContext context(gpu());
  for (unsigned long long seed = 0; seed < random_problems(300); ++seed) {
    check::RandomChoices c(seed);
    Indices cu, padded;
    for (Index i = 0; i < 40; ++i) {
      cu.push_back(c.one_in(4) ? c.pick(-(Index{1} << 62), Index{1} << 62) : c.pick(-4, 70));
      padded.push_back(c.one_in(4) ? c.pick(-(Index{1} << 62), Index{1} << 62) : c.pick(-4, 70));
    }
    const DeviceOffsets offsets(cu, c.one_in(2) ? padded : Indices{}, 64, c.one_in(2));
    const DeviceLayout layout{static_cast<LayoutKind>(seed % 4), 4};
    const DevicePlanArgs args{offsets.stream(),
                              {},
                              {.causal = c.one_in(2), .chunk = c.one_in(2) ? std::optional<Index>(3) : std::nullopt},
                              layout.runs(1),
                              layout.rank_order()};
    EXPECT_TRUE(planned(context, args).empty()) << seed;
    EXPECT_THROW(context.check(), Error) << seed;
  }
}

TEST(DevicePlan, TooSmallIsReported) {
  DeviceContext context(gpu());
  const DeviceOffsets offsets({0, 8, 16, 32}, {}, 32, false), keys({0, 8, 16, 32}, {}, 40, false);
  const DeviceLayout layout{LayoutKind::dual_chunk, 2}, short_rows{LayoutKind::dual_chunk, 2, 15};
  DevicePlan plan(context, 3);
  plan.plan({offsets.stream(), {}, {}, layout.runs(1), layout.rank_order()});
  EXPECT_TRUE(plan.download().empty());
  expect_refusal([&] { context.check(); }, {"do not fit the room for 3"});
  DevicePlan room(context, 100);
  room.plan({offsets.stream(), keys.stream(), {}, layout.runs(1), short_rows.rank_order()});
  EXPECT_TRUE(room.download().empty());
  expect_refusal([&] { context.check(); }, {"keys", "needs 16 rows and has 15"});
}

TEST(DevicePlan, Refusals) {
  DeviceContext context(gpu());
  DevicePlan plan(context, 10);
  const DeviceOffsets offsets({0, 8}, {}, 8, false);
  const DeviceLayout layout{LayoutKind::balanced, 2}, good{LayoutKind::zigzag, 2}, striped{LayoutKind::striped, 2};
  const DeviceStream s = offsets.stream();
  expect_refusal([&] { plan.plan({s, {}, {}, layout.runs(0), layout.runs(0)}); }, {"balanced", "upload"});
  expect_refusal([&] { plan.plan({s, {}, {.slices = std::vector<Slice>{}}, good.runs(0), good.runs(0)}); },
                 {"slices", "upload"});
  expect_refusal([&] { plan.plan({s, {}, {}, striped.runs(0), DeviceLayout::sequence_order()}); }, {"stride"});
  expect_refusal([&] { plan.plan({{}, {}, {}, good.runs(0), good.runs(0)}); }, {"cu_seqlens"});
  expect_refusal([&] { DeviceContext cpu{Place{}}; }, {"CPU"});
}

// --- The work of each tile ---

using cuda::Side;
using cuda::Tiling;
using cuda::WorkList;
using cuda::WorkLists;
using cuda::WorkSlice;

template <class T>
std::vector<T> read(const T* from, std::size_t n) {
  std::vector<T> out(n);
  expect_ok(cudaMemcpy(out.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost));
  return out;
}

struct HostWork {
  explicit HostWork(const WorkList& list, const Tiling& tiling) {
    expect_ok(cudaDeviceSynchronize());
    const auto tiles = static_cast<std::size_t>(tiling.tiles());
    if (tiles == 0) return;
    order = read(list.order, tiles);
    ranges = read(list.ranges, tiles);
    int entries = 0;
    for (const int2& r : ranges) entries = std::max(entries, r.y);
    slices = read(list.slices, static_cast<std::size_t>(entries));
    EXPECT_EQ(read(list.tiles, 1)[0], tiling.tiles());
  }
  std::vector<WorkSlice> of(std::size_t tile) const {
    return {slices.begin() + ranges[tile].x, slices.begin() + ranges[tile].y};
  }

  std::vector<int> order;
  std::vector<WorkSlice> slices;
  std::vector<int2> ranges;
};

bool same(const std::vector<WorkSlice>& a, const std::vector<WorkSlice>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(WorkSlice)) == 0);
}

// What each tile has, one slice after the other, and the order of the tiles.
void expect_work(const WorkList& list, const std::vector<Slice>& slices, const Tiling& tiling,
                 const std::string& what) {
  const HostWork work(list, tiling);
  std::vector<Index> cost(work.ranges.size());
  for (std::size_t t = 0; t < work.ranges.size(); ++t) {
    const Index begin = static_cast<Index>(t) * tiling.size, end = begin + tiling.size;
    std::vector<WorkSlice> wanted;
    for (const Slice& slice : slices) {
      Slice s = trimmed(slice, true);
      Index &from = tiling.side == Side::key ? s.k_begin : s.q_begin,
            &to = tiling.side == Side::key ? s.k_end : s.q_end;
      if (s.q_begin >= s.q_end || from >= end || to <= begin) continue;
      wanted.push_back(cuda::work_slice(slice));
      from = max_of(from, begin);
      to = min_of(to, end);
      cost[t] += visible_pairs(s);
    }
    ASSERT_TRUE(same(work.of(t), wanted)) << what << ", tile " << t;
  }
  std::vector<int> sorted = work.order;
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t t = 0; t < sorted.size(); ++t) ASSERT_EQ(sorted[t], static_cast<int>(t)) << what;
  for (std::size_t t = 1; t < work.order.size(); ++t)
    EXPECT_LE(static_cast<double>(cost[static_cast<std::size_t>(work.order[t])]),
              1.25 * static_cast<double>(cost[static_cast<std::size_t>(work.order[t - 1])]))
        << what;
}

// Both sides at once, as a backward has them, and the heads beside them.
TEST(DeviceWork, ListsAreTheHosts) {
  DeviceContext context(gpu());
  for (unsigned long long seed = 0; seed < random_problems(400); ++seed) {
    check::RandomChoices choices(seed);
    const auto kind = static_cast<LayoutKind>(seed % 4);
    const check::Case c = random_case(choices, kind);
    if (c.mask.slices) continue;
    const Problem p = problem_of(c);
    const Layouts l = layouts_of(c, p);
    const Sides sides(c, p, false, 0);
    const DeviceLayout dq{kind, c.ranks, l.q.rows()}, dk{kind, c.ranks, l.k.rows()};
    const bool ordered = kind != LayoutKind::striped && choices.one_in(2);
    const DevicePlanArgs args{sides.q.stream(), sides.k.stream(), c.mask, dq.runs(0),
                              ordered ? DeviceLayout::sequence_order() : dk.rank_order()};
    DevicePlan plan(context, device_plan_capacity(args));
    plan.plan(args);
    const std::vector<Slice> slices = plan.download();
    const Tiling tilings[] = {{Side::query, plan.slices().q_rows, static_cast<int>(choices.pick(1, 7))},
                              {Side::key, plan.slices().k_rows, static_cast<int>(choices.pick(1, 7))}};
    const Indices map = choices.one_in(2) ? Indices{2, 0, 2, 1, 2} : Indices{};
    const cuda::HeadGroups heads{map.empty() ? 6 : 5, 3, map};
    for (const std::size_t sides_asked : {1u, 2u}) {
      const WorkLists made = build_lists(plan, {tilings, sides_asked}, heads, nullptr);
      ASSERT_EQ(made.lists.size(), sides_asked);
      for (std::size_t n = 0; n < sides_asked; ++n) expect_work(made.lists[n], slices, tilings[n], flags(c));
      const WorkLists host = make_work_lists(slices, nullptr, {tilings, sides_asked}, heads, nullptr);
      const auto n = at(heads.heads_q);
      EXPECT_EQ(read(made.heads.kv_head, n), read(host.heads.kv_head, n));
      EXPECT_EQ(read(made.heads.begin, 4), read(host.heads.begin, 4));
      EXPECT_EQ(read(made.heads.heads, n), read(host.heads.heads, n));
    }
    ASSERT_NO_THROW(context.check()) << flags(c);
  }
}

// Slices of many tiles, which a warp marks together, among short ones; tiles with slices that are far apart.
TEST(DeviceWork, LongAndShortSlices) {
  DeviceContext context(gpu());
  Plan host{{}, 70000, 70000};
  for (Index i = 0; i < 500; ++i) host.slices.push_back({i * 100, i * 100 + i % 90, i * 3, i * 3 + 40, -kUnlimited, 5});
  host.slices.push_back({0, 70000, 40000, 70000, -kUnlimited, 0});
  host.slices.push_back({5, 5, 0, 9});
  host.slices.push_back({0, 50, 0, 50, 100, 200});  // shows nothing
  for (Index i = 0; i < 200; ++i) host.slices.push_back({60000 - i * 300, 60300 - i * 300, i, 30000, -100, 100000});
  DevicePlan plan(context, 3000);
  plan.upload(host);
  const Tiling tilings[] = {{Side::query, 70000, 64}, {Side::key, 70000, 128}};
  const WorkLists made = build_lists(plan, tilings, {2, 1, {}}, nullptr);
  for (std::size_t n = 0; n < 2; ++n) expect_work(made.lists[n], host.slices, tilings[n], "long");
  EXPECT_NO_THROW(context.check());
}

// A plan that is uploaded under a graph and has more slices over a row than the one it was captured with.
TEST(DeviceWork, TooSmallIsReported) {
  const TestStream stream;
  DeviceContext context(gpu(stream.stream));
  DevicePlan plan(context, 3);
  const Plan flat{{{0, 8, 0, 8}, {8, 16, 8, 16}}, 16, 16};
  const Plan deep{{{0, 16, 0, 4}, {0, 16, 4, 8}, {0, 16, 8, 12}}, 16, 16};
  plan.upload(flat);
  const Tiling rows[] = {{Side::query, 16, 4}};
  const DeviceArray<int2> ranges(4);
  stream.wait();
  const cudaGraphExec_t graph = capture(stream.stream, [&] {
    const WorkLists made = build_lists(plan, rows, {1, 1, {}}, stream.stream);
    expect_ok(
        cudaMemcpyAsync(ranges.get(), made.lists[0].ranges, 4 * sizeof(int2), cudaMemcpyDeviceToDevice, stream.stream));
  });
  expect_ok(cudaGraphLaunch(graph, stream.stream));
  stream.wait();
  for (const int2& r : ranges.host()) EXPECT_EQ(r.y - r.x, 1);
  EXPECT_NO_THROW(context.check());
  plan.upload(deep);
  expect_ok(cudaGraphLaunch(graph, stream.stream));
  stream.wait();
  for (const int2& r : ranges.host()) EXPECT_EQ(r.x, r.y);
  expect_refusal([&] { context.check(); }, {"12 slices, entries or tiles do not fit the room for 6"});
  cudaGraphExecDestroy(graph);
}

TEST(DeviceWork, Refusals) {
  DeviceContext context(gpu());
  DevicePlan plan(context, 2);
  expect_refusal([&] { plan.upload({{{0, 8, 0, 9}}, 8, 8}); }, {"slice 0", "8 key rows"});
  expect_refusal([&] { plan.upload({{{0, 8, 0, 8}, {-1, 8, 0, 8}}, 8, 8}); }, {"slice 1", "-1"});
  expect_refusal([&] { plan.upload({{}, -1, 8}); }, {"-1 query rows"});
  plan.upload({{{0, 8, 0, 8}}, 8, 8});
  const Tiling rows[] = {{Side::query, 8, 4}};
  const Indices map(1025, 0);
  expect_refusal([&] { build_lists(plan, rows, {1025, 1, map}, nullptr); }, {"head_map", "1025"});
}

// --- A graph plans anew from whatever the offsets are when it is replayed ---

TEST(DevicePlan, ReplaysOnOtherOffsets) {
  const TestStream stream;
  DeviceContext context(gpu(stream.stream));
  const Index sequences = 64, tokens = 64 * 48, ranks = 4;
  DeviceArray<std::int32_t> cu(static_cast<std::size_t>(sequences + 1));
  const DeviceStream s{cu.get(), nullptr, OffsetType::i32, sequences, tokens};
  const DeviceLayout layout{LayoutKind::dual_chunk, ranks};
  const DevicePlanArgs args{s, {}, {.causal = true}, layout.runs(2), layout.rank_order()};
  const Index capacity = device_plan_capacity(args);
  DevicePlan plan(context, capacity);
  const Index q_rows = rows_for(layout.kind, tokens, ranks);
  stream.wait();
  const cudaGraphExec_t graph = capture(stream.stream, [&] {
    plan.plan(args);
    expect_refusal([&] { plan.upload({}); }, {"captured"});
  });
  for (unsigned long long seed = 0; seed < 20; ++seed) {
    check::RandomChoices c(seed);
    Indices lengths;
    for (Index i = 0; i < sequences; ++i) lengths.push_back(seed % 3 == 0 && i > 20 ? 0 : 8 * c.pick(0, 6));
    const Stream host = Stream::from_lengths(lengths);
    std::vector<std::int32_t> narrow(host.offsets().begin(), host.offsets().end());
    cu.set(narrow);
    expect_ok(cudaGraphLaunch(graph, stream.stream));
    const Problem p(host, args.mask);
    const Layout l = Layout::dual_chunk(host, ranks);
    const std::vector<Slice> device = plan.download();
    EXPECT_EQ(device, saturated(host_plan(p, l.runs(2), l.rank_order(), q_rows)));
    ASSERT_NO_THROW(context.check());
  }
  cudaGraphExecDestroy(graph);
}

}  // namespace
}  // namespace weft
