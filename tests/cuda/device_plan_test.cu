// Plans from offsets in device memory: entry by entry what make_plan gives, on thousands of random problems; wrong
// offsets; graphs; the work of each tile.
#include <algorithm>
#include <variant>

#include "../refusal.h"
#include "device_array.h"
#include "plan/cuda/work.h"
#include "plan/cut.h"
#include "plan/pairs.h"
#include "plan/parts.h"
#include "weft/device_plan.h"
#include "weft/plan.h"

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

// make_plan with buffers of `rows` rows a rank.
std::vector<Slice> host_plan(const Problem& p, const RunList& q, const RunList& k, Index k_rows) {
  RegularRuns k_runs = std::get<RegularRuns>(k.source().runs);
  if (!k.in_sequence_order()) k_runs.rows = k_rows;
  const SequencePlanner planner{view(p.packing().q()),
                                view(p.packing().k()),
                                view(p.mask()),
                                std::get<RegularRuns>(q.source().runs),
                                k_runs,
                                q.stride(),
                                k.in_sequence_order()};
  std::vector<Slice> out;
  for (Index i = 0; i < p.packing().sequences(); ++i) {
    out.resize(out.size() + static_cast<std::size_t>(planner.count(i)));
    planner.emit(i, out.data() + out.size() - static_cast<std::size_t>(planner.count(i)));
  }
  return out;
}

struct Sides {
  DeviceOffsets q, k;

  Sides(const check::Case& c, const Problem& p, bool wide, Index spare)
      : q(c.q, p.packing().q(), wide, spare), k(c.k ? *c.k : c.q, p.packing().k(), wide, spare) {}
};

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
      const Index capacity = device_plan_capacity(args);
      DevicePlan plan(context, capacity);
      plan.plan(args);
      const std::vector<Slice> device = plan.download();
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
    DevicePlan plan(context, device_plan_capacity(args));
    plan.plan(args);
    EXPECT_EQ(plan.download(), saturated(make_plan(p, l.q.rank_order(q), l.k.rank_order(k)).slices)) << flags(c);
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
      DevicePlan plan(context, device_plan_capacity(args));
      plan.plan(args);
      EXPECT_TRUE(plan.download() == saturated(make_plan(p, l.runs(3), l.rank_order()).slices)) << count << name(kind);
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
    DevicePlan plan(context, device_plan_capacity(args));
    plan.plan(args);
    EXPECT_TRUE(plan.download().empty()) << seed;
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

struct HostWork {
  std::vector<std::int32_t> order, slices;
  std::vector<TileRange> ranges;
  std::int32_t count = 0;
};

template <class T>
std::vector<T> read(const T* from, std::size_t n) {
  std::vector<T> out(n);
  expect_ok(cudaMemcpy(out.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost));
  return out;
}

HostWork read(const DeviceWork& work, Index capacity) {
  expect_ok(cudaDeviceSynchronize());
  const auto tiles = static_cast<std::size_t>(work.tiles);
  return {read(work.order, tiles), read(work.slices, static_cast<std::size_t>(capacity)), read(work.ranges, tiles),
          read(work.count, 1)[0]};
}

void expect_work(const HostWork& work, const std::vector<Slice>& slices, WorkSide side, Index tile_rows,
                 const std::string& what) {
  std::vector<Index> cost(work.ranges.size());
  Index with_slices = 0;
  for (std::size_t t = 0; t < work.ranges.size(); ++t) {
    const Index begin = static_cast<Index>(t) * tile_rows, end = begin + tile_rows;
    std::vector<std::int32_t> wanted;
    for (std::size_t i = 0; i < slices.size(); ++i) {
      Slice s = slices[i];
      Index &from = side == WorkSide::keys ? s.k_begin : s.q_begin, &to = side == WorkSide::keys ? s.k_end : s.q_end;
      if (from >= end || to <= begin) continue;
      wanted.push_back(static_cast<std::int32_t>(i));
      from = max_of(from, begin);
      to = min_of(to, end);
      cost[t] += visible_pairs(s);
    }
    const auto at = work.slices.begin();
    ASSERT_EQ(std::vector<std::int32_t>(at + work.ranges[t].begin, at + work.ranges[t].end), wanted) << what << t;
    if (!wanted.empty()) ++with_slices;
  }
  EXPECT_EQ(work.count, with_slices) << what;
  std::vector<std::int32_t> sorted = work.order;
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t t = 0; t < sorted.size(); ++t) ASSERT_EQ(sorted[t], static_cast<std::int32_t>(t)) << what;
  for (std::size_t t = 1; t < work.order.size(); ++t)
    EXPECT_LE(static_cast<double>(cost[static_cast<std::size_t>(work.order[t])]),
              1.25 * static_cast<double>(cost[static_cast<std::size_t>(work.order[t - 1])]))
        << what;
}

TEST(DeviceWork, SlicesOfEachTileInOrder) {
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
    const DevicePlanArgs args{sides.q.stream(), sides.k.stream(), c.mask, dq.runs(0), dk.rank_order()};
    const Index capacity = device_plan_capacity(args);
    DevicePlan plan(context, capacity);
    const int tile_rows = static_cast<int>(choices.pick(1, 7));
    plan.plan(args);
    const DeviceSlices slices = plan.slices();
    const Index room = work_capacity(capacity, ceil_div(slices.q_rows, tile_rows), device_slices_per_row(args));
    WorkList list(context.parts(), WorkSide::queries, slices.q_rows, tile_rows, room);
    list.build(slices);
    list.build(slices);  // the counters are put back
    expect_work(read(list.view(), room), plan.download(), WorkSide::queries, tile_rows, flags(c));
    const Index k_room = capacity * (1 + slices.k_rows / tile_rows);
    WorkList keys(context.parts(), WorkSide::keys, slices.k_rows, tile_rows, k_room);
    keys.build(slices);
    expect_work(read(keys.view(), k_room), plan.download(), WorkSide::keys, tile_rows, flags(c));
    ASSERT_NO_THROW(context.check()) << flags(c);
  }
}

TEST(DeviceWork, TooSmallIsReported) {
  DeviceContext context(gpu());
  DevicePlan plan(context, 2);
  plan.upload({{{0, 8, 0, 8}, {8, 16, 8, 16}}, 16, 16});
  WorkList list(context.parts(), WorkSide::queries, 16, 4, 1);
  list.build(plan.slices());
  const HostWork work = read(list.view(), 1);
  expect_refusal([&] { context.check(); }, {"do not fit"});
  EXPECT_LE(work.count, 1);
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
  const Index q_rows = rows_for(layout.kind, tokens, ranks), tile_rows = 64;
  const Index room = work_capacity(capacity, ceil_div(q_rows, tile_rows), device_slices_per_row(args));
  WorkList work(context.parts(), WorkSide::queries, q_rows, static_cast<int>(tile_rows), room);
  stream.wait();
  const cudaGraphExec_t graph = capture(stream.stream, [&] {
    plan.plan(args);
    work.build(plan.slices());
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
    expect_work(read(work.view(), room), device, WorkSide::queries, tile_rows, "graph");
    ASSERT_NO_THROW(context.check());
  }
  cudaGraphExecDestroy(graph);
}

}  // namespace
}  // namespace weft
