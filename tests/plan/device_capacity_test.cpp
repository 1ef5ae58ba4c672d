// Room for plans and steps made on a device: enough for any offsets, and what is refused. No device is needed.
#include <gtest/gtest.h>

#include "check/cases/random_case.h"
#include "index.h"
#include "plan/device_runs.h"
#include "refusal.h"
#include "weft/device_plan.h"
#include "weft/device_rows.h"
#include "weft/plan.h"

namespace weft {
namespace {

DeviceStream sized(const Stream& s) { return {.sequences = s.sequences(), .tokens = s.tokens()}; }

// The most slices in which one query row sees a key, or in which one key row is seen.
Index most_per_row(const std::vector<Slice>& slices, Index rows, bool keys) {
  std::vector<Index> over(at(rows));
  Index most = 0;
  for (const Slice& slice : slices) {
    const Slice s = trimmed(slice, true);
    const Range seen = s.q_begin >= s.q_end ? Range{} : keys ? Range{s.k_begin, s.k_end} : Range{s.q_begin, s.q_end};
    for (Index row = seen.begin; row < seen.end; ++row) most = max_of(most, ++over[at(row)]);
  }
  return most;
}

// Ranges of query rows that slices connect, each with the row before it.
Index query_ranges(const std::vector<Slice>& slices, Index rows) {
  std::vector<bool> covered(at(rows)), continues(at(rows));
  for (const Slice& slice : slices) {
    const Slice s = trimmed(slice, true);
    for (Index row = s.q_begin; row < s.q_end; ++row) {
      covered[at(row)] = true;
      if (row > s.q_begin) continues[at(row)] = true;
    }
  }
  Index ranges = 0;
  for (Index row = 0; row < rows; ++row) ranges += covered[at(row)] && !continues[at(row)] ? 1 : 0;
  return ranges;
}

void expect_room(const Problem& p, const Layouts& l, LayoutKind kind, Index ranks, const std::string& what) {
  const DeviceLayout device{kind, ranks};
  const DeviceStream q = sized(p.packing().q()), k = p.packing().self() ? DeviceStream{} : sized(p.packing().k());
  struct Keys {
    RunList host;
    DeviceRuns device;
  };
  for (Index rank = 0; rank < ranks; ++rank) {
    for (const Keys& keys :
         {Keys{l.k.rank_order(), device.rank_order()}, Keys{l.k.runs(ranks - 1), device.runs(ranks - 1)},
          Keys{l.k.sequence_order(), DeviceLayout::sequence_order()}}) {
      const RunList own = l.q.runs(rank);
      if (own.stride() != keys.host.stride()) continue;
      const std::vector<Slice> slices = make_plan(p, own, keys.host).slices;
      const DevicePlanArgs args{q, k, p.mask(), device.runs(rank), keys.device};
      ASSERT_LE(static_cast<Index>(slices.size()), device_plan_capacity(args)) << what;
      ASSERT_LE(most_per_row(slices, own.rows(), false), device_slices_per_row(args)) << what;
      ASSERT_LE(most_per_row(slices, keys.host.rows(), true), device_slices_per_key(args)) << what;
      ASSERT_LE(query_ranges(slices, own.rows()), device_query_ranges(args)) << what;
    }
  }
  const std::vector<Slice> all = make_plan(p, l.q.rank_order(), l.k.rank_order()).slices;
  const DevicePlanArgs args{q, k, p.mask(), device.rank_order(), device.rank_order()};
  ASSERT_LE(static_cast<Index>(all.size()), device_plan_capacity(args)) << what;
  ASSERT_LE(most_per_row(all, l.k.rank_order().rows(), true), device_slices_per_key(args)) << what;
}

TEST(DeviceCapacity, HoldsRandomProblems) {
  for (unsigned long long seed = 0; seed < 8000; ++seed) {
    check::RandomChoices choices(seed);
    const auto kind = static_cast<LayoutKind>(seed % 4);
    const check::Case c = random_case(choices, kind);
    if (c.mask.slices) continue;
    const Problem p = problem_of(c);
    expect_room(p, layouts_of(c, p), kind, c.ranks, flags(c));
  }
}

// As many cuts as there can be: documents, chunks and windows around the length of a piece.
TEST(DeviceCapacity, HoldsTheWorst) {
  for (const Index ranks : {1, 2, 3, 5}) {
    for (const Index length : {1, 2, 3, 7, 30}) {
      for (const Index sequences : {1, 2, 9}) {
        for (const Index chunk : {0, 1, 2, 3, 11}) {
          for (const Index left : {-1, 0, 1, 5}) {
            for (const auto kind :
                 {LayoutKind::contiguous, LayoutKind::dual_chunk, LayoutKind::zigzag, LayoutKind::striped}) {
              const Stream plain = Stream::from_lengths(std::vector<Index>(at(sequences), length));
              const Stream stream = kind == LayoutKind::dual_chunk ? plain.padded_to(2 * ranks) : plain;
              Mask mask{.left = left, .right = left};
              if (chunk > 0) mask.chunk = chunk;
              const Problem p(stream, mask);
              expect_room(p, make_layouts(kind, p, ranks), kind, ranks, std::string(name(kind)));
            }
          }
        }
      }
    }
  }
}

// Room is room: a plan that fills it.
TEST(DeviceCapacity, IsMetExactly) {
  const Problem p(Stream::from_lengths(std::vector<Index>(4, 16)), {});
  const Layout l = Layout::dual_chunk(p.packing().q(), 4);
  const DeviceLayout d{LayoutKind::dual_chunk, 4};
  const DevicePlanArgs args{sized(p.packing().q()), {}, {}, d.runs(0), d.rank_order()};
  // 4 sequences x 2 runs of queries x 7 runs of keys: the last rank's two are one.
  EXPECT_EQ(device_plan_capacity(args), 56);
  EXPECT_EQ(make_plan(p, l.runs(0), l.rank_order()).slices.size(), 56u);
}

// A window limited on both sides: among all keys a row sees its own, and of one other rank's it may see none.
TEST(DeviceCapacity, RangesOfRowsThatSeeTheirOwnKeys) {
  const DeviceStream s{.sequences = 64, .tokens = 131072};
  const DeviceLayout d{LayoutKind::dual_chunk, 8};
  const Mask window{.causal = true, .left = 4096};
  const DevicePlanArgs whole{s, {}, window, d.runs(0), d.rank_order()}, other{s, {}, window, d.runs(0), d.runs(3)};
  EXPECT_EQ(device_query_ranges(whole), 128);
  EXPECT_GT(device_query_ranges(other), 128);
}

// Striped keys lie in a run a rank, of which a narrow band meets few.
TEST(DeviceCapacity, NarrowBandsMeetFewRuns) {
  const DeviceStream s{.sequences = 4, .tokens = 64};
  const DeviceLayout striped{LayoutKind::striped, 4};
  const auto args = [&](const Mask& mask) {
    return DevicePlanArgs{s, {}, mask, striped.runs(0), striped.rank_order()};
  };
  EXPECT_EQ(device_slices_per_row(args({})), 4);
  EXPECT_EQ(device_slices_per_row(args({.causal = true, .left = 1})), 2);
  EXPECT_EQ(device_slices_per_key(args({.causal = true, .left = 1})), 1);
}

TEST(DeviceCapacity, Rows) {
  for (Index tokens : {0, 1, 7, 16, 48}) {
    const Stream s = Stream::from_lengths(std::vector<Index>{tokens});
    EXPECT_EQ(rows_for(LayoutKind::contiguous, tokens, 3), Layout::contiguous(s, 3).rows());
    EXPECT_EQ(rows_for(LayoutKind::zigzag, tokens, 3), Layout::zigzag(s, 3).rows());
    EXPECT_EQ(rows_for(LayoutKind::striped, tokens, 3), Layout::striped(s, 3).rows());
  }
  EXPECT_EQ(rows_for(LayoutKind::dual_chunk, 48, 3), 16);
}

TEST(DeviceCapacity, Refuses) {
  const DeviceStream s{.sequences = 4, .tokens = 64};
  const DeviceLayout good{LayoutKind::zigzag, 2}, balanced{LayoutKind::balanced, 2}, striped{LayoutKind::striped, 2};
  const DeviceRuns runs = good.runs(0);
  expect_refusal([&] { device_plan_capacity({s, {}, {}, balanced.runs(0), runs}); }, {"balanced", "make_plan"});
  expect_refusal([&] { device_plan_capacity({s, {}, {}, DeviceLayout{LayoutKind::placed, 2}.runs(0), runs}); },
                 {"placed", "make_plan"});
  expect_refusal([&] { device_plan_capacity({s, {}, {.slices = std::vector<Slice>{}}, runs, runs}); },
                 {"slices of its own"});
  expect_refusal([&] { device_plan_capacity({s, {}, {.left = -2}, runs, runs}); }, {"window left = -2"});
  expect_refusal([&] { device_plan_capacity({s, {}, {}, striped.runs(0), runs}); }, {"stride 2", "stride 1"});
  expect_refusal([&] { device_plan_capacity({s, {}, {}, good.runs(2), runs}); }, {"rank 2"});
  DeviceRuns still = runs;
  still.members.step = 0;
  expect_refusal([&] { device_plan_capacity({s, {}, {}, still, runs}); }, {"in steps of 0"});
  expect_refusal([&] { device_plan_capacity({s, {.sequences = 5, .tokens = 64}, {}, runs, runs}); }, {"4 sequences"});
  expect_refusal([&] { device_plan_capacity({{.sequences = -1}, {}, {}, runs, runs}); }, {"-1 sequences"});
  const DeviceLayout wide{LayoutKind::dual_chunk, 1 << 19};
  const DeviceStream many{.sequences = 1 << 20, .tokens = kMaxTokens};
  expect_refusal([&] { device_plan_capacity({many, {}, {}, wide.runs(0), wide.rank_order()}); }, {"past the limit"});
  expect_refusal([&] { device_step_capacity({.q = s, .layout = good}); }, {"zigzag", "dual_chunk"});
}

// Where the library has no CUDA it says so; where it has, this is no test of it.
TEST(DeviceContext, SaysWhatIsMissing) {
  const std::string said = error_of([] { const DeviceContext context({DeviceKind::cuda, 0, nullptr}); });
  if (said.empty() || said.starts_with("CUDA:")) GTEST_SKIP() << said;
  expect_parts(said, {"without CUDA; configure it with -DWEFT_CUDA=ON"});
}

TEST(DeviceCapacity, HoldsStepsAndChunks) {
  for (unsigned long long seed = 0; seed < 4000; ++seed) {
    check::RandomChoices choices(seed);
    check::Case c = random_case(choices, LayoutKind::dual_chunk);
    c.mask.slices.reset();
    c.mask.chunk = choices.pick(1, 9);
    const Problem p = problem_of(c);
    const Layouts l = layouts_of(c, p);
    const DeviceStream q = sized(p.packing().q()), k = sized(p.packing().k());
    for (Index rank = 0; rank < c.ranks; ++rank) {
      const DeviceStepArgs args{q, k, c.mask, {LayoutKind::dual_chunk, c.ranks}, rank, 0};
      for (const Index step : {0, 1})
        ASSERT_LE(all_gather_step(p, l.q, rank, step).entries(), device_step_capacity(args)) << flags(c);
      Mask causal{.causal = true, .chunk = c.mask.chunk};
      const Problem self(p.packing().q(), causal);
      for (Index step = 0; step < c.ranks; ++step)
        ASSERT_LE(ring_step(self, l.q, rank, step).entries(), device_step_capacity(args)) << flags(c);
    }
    const Chunks chunks = sequences_to_chunks(p.packing().q(), *c.mask.chunk);
    ASSERT_LE(static_cast<Index>(chunks.sequence.size()), device_chunks_capacity(q, *c.mask.chunk));
  }
}

}  // namespace
}  // namespace weft
