#include "cuda/launch.h"
#include "kernel/cuda/sm90/lists/cut_tiles.cuh"
#include "kernel/cuda/sm90/lists/device_tiles.h"
#include "kernel/cuda/sm90/lists/fill_tiles.cuh"
#include "text.h"

namespace weft::cuda::sm90 {
namespace {

struct TilingSizes {
  Side side;
  int size;
  FullTiles full;
  Items kind;

  Index rows(const detail::DevicePlanData& plan) const { return side == Side::query ? plan.q_rows : plan.k_rows; }
  // Tiles from row 0 on, which have the most entries of slices that these may have: a slice has one more for each
  // boundary of tiles that it crosses, and runs have no more of those than all rows together.
  Tiling even(const detail::DevicePlanData& plan) const { return {side, rows(plan), size}; }
  Index held(const detail::DevicePlanData& plan) const {
    return side == Side::query ? plan.query_ranges : plan.capacity;  // a slice has one range of keys
  }
  Index most(const detail::DevicePlanData& plan) const { return most_tiles(rows(plan), size, held(plan), full); }
  int item_bytes() const {
    return kind == Items::forward ? static_cast<int>(sizeof(ForwardItem))
           : kind == Items::keys  ? static_cast<int>(sizeof(int4))
                                  : static_cast<int>(sizeof(DqItem));
  }
};

struct Jobs {
  TilesJob tiles;
  HeadJob heads;
  int* counters;
  std::size_t zeros, numbers;  // ints to be zeroed, and ints in all
};

SideMarks place_marks(Index rows, Room& room) {
  const int words = words_of(rows);
  return {.rows = static_cast<int>(rows),
          .words = words,
          .begins = room.take<RowBits>(words),
          .joins = room.take<RowBits>(words),
          .covers = room.take<int>(words),
          .touched = room.take<int2>(words)};
}

void place_tiling(TilingJob& job, const TilingSizes& sizes, const detail::DevicePlanData& plan, Room& room) {
  const int words = words_of(sizes.rows(plan));
  job.side = sizes.side == Side::query ? 0 : 1;
  job.size = sizes.size;
  job.most = static_cast<int>(sizes.most(plan));
  job.full = sizes.full;
  job.kind = sizes.kind;
  job.runs = room.take<RowBits>(words);
  job.held = room.take<RowBits>(words);
  job.tiles = room.take<RowBits>(words);
  job.run_before = room.take<int>(words);
  job.tiles_before = room.take<int>(words);
  job.index = {job.runs, job.tiles, job.run_before, job.tiles_before};
  job.ranges = room.take<int2>(job.most);
  if (sizes.kind == Items::none) return;
  job.capacity =
      work_capacity(plan.capacity, sizes.even(plan).tiles(), sizes.side == Side::query ? plan.per_row : plan.per_key);
  job.slices = room.take<WorkSlice>(job.capacity);
  job.members = room.take<int2>(job.most);
  job.first = room.take<int>(job.most);
  job.costs = room.take<int>(job.most);
  job.cost = room.take<std::uint8_t>(job.most);
  job.order = room.take<int>(job.most);
  job.items = room.take<char>(Index{job.most} * sizes.item_bytes());
}

// Of the queries alone, or of both sides: tilings[0] is one of the queries.
Jobs place_jobs(const detail::DevicePlanData& plan, std::span<const TilingSizes> tilings, const HeadGroups& heads,
                int counters, int* memory) {
  Jobs jobs{};
  Room room(memory);
  TilesJob& job = jobs.tiles;
  job.slices = plan.slices.get();
  job.slice_count = plan.count.get();
  job.slice_capacity = static_cast<int>(plan.capacity);
  job.q_rows = static_cast<int>(plan.q_rows);
  job.k_rows = static_cast<int>(plan.k_rows);
  job.reporter = plan.context->reporter();
  job.sides[job.side_count++] = place_marks(plan.q_rows, room);
  for (const TilingSizes& t : tilings)
    if (t.side == Side::key) job.sides[job.side_count++] = place_marks(plan.k_rows, room);
  TilingState* const states = room.take<TilingState>(static_cast<Index>(tilings.size()));
  jobs.counters = room.take<int>(counters);
  for (const TilingSizes& t : tilings) {
    TilingJob& tiling = job.tilings[job.tiling_count];
    tiling.state = states + job.tiling_count++;
    if (t.kind == Items::keys) tiling.unseen = room.take<int2>(t.most(plan));
  }
  jobs.zeros = room.used();
  for (std::size_t n = 0; n < tilings.size(); ++n) place_tiling(job.tilings[n], tilings[n], plan, room);
  place_heads(jobs.heads, heads, room);
  jobs.numbers = room.used();
  return jobs;
}

// Tiles are numbered, and so are their rows, with those past their ends.
void check_tiles(const detail::DevicePlanData& plan, std::span<const TilingSizes> tilings) {
  for (const TilingSizes& t : tilings)
    if (t.most(plan) * t.size > kMaxTokens)
      throw Error(text("a device_plan for ", t.held(plan), " ranges of rows in ", t.rows(plan), " rows may have ",
                       t.most(plan), " tiles of ", t.size, " rows"),
                  "give it fewer rows at a time, a smaller capacity, or slices on the host");
}

struct Made {
  StreamArray<int> memory;
  Jobs jobs;
};
Made make_tiles(DevicePlan& plan, std::span<const TilingSizes> tilings, const HeadGroups& heads, int counters,
                cudaStream_t stream) {
  detail::DevicePlanData& data = plan.data();
  data.context->enter();
  std::vector<Tiling> even;
  for (const TilingSizes& t : tilings) even.push_back(t.even(data));
  check_sizes(data, even, heads);
  check_tiles(data, tilings);
  Made made{StreamArray<int>(place_jobs(data, tilings, heads, counters, nullptr).numbers, stream), {}};
  made.jobs = place_jobs(data, tilings, heads, counters, made.memory.get());
  const Jobs& jobs = made.jobs;
  WEFT_CUDA(cudaMemsetAsync(made.memory.get(), 0, jobs.zeros * sizeof(int), stream));
  // Only the device knows the number of slices: threads for most plans, which loop over more.
  constexpr Index kBlocks = 264;
  const Index blocks = min_of(kBlocks, ceil_div(data.capacity, kListThreads));
  launch(&mark_slices, {dim3(static_cast<unsigned>(blocks) + 1), dim3(kListThreads), 0}, stream, jobs.tiles,
         jobs.heads);
  launch(&cut_tiles, {dim3(static_cast<unsigned>(tilings.size())), dim3(kCutThreads), 0, true}, stream, jobs.tiles);
  Index tiles = 0;
  for (int n = 0; n < jobs.tiles.tiling_count; ++n)
    if (jobs.tiles.tilings[n].kind != Items::none) tiles += jobs.tiles.tilings[n].most;
  constexpr Index kFillBlocks = 16 * 132;  // as many as run at once
  launch(&fill_tiles, {dim3(static_cast<unsigned>(min_of(tiles, kFillBlocks))), dim3(kListThreads), 0, true}, stream,
         jobs.tiles);
  return made;
}

template <class Item>
DeviceItems<Item> items_of(const TilingJob& job, const int* count) {
  return {static_cast<const Item*>(job.items), job.slices, job.most, count};
}
WorkHeads heads_of(const Jobs& jobs) { return {jobs.heads.kv_head, jobs.heads.begin, jobs.heads.heads}; }

}  // namespace

int most_forward_tiles(DevicePlan& plan, int size) {
  return static_cast<int>(TilingSizes{Side::query, size, FullTiles::from_end, Items::forward}.most(plan.data()));
}

DeviceForwardTiles build_forward_tiles(DevicePlan& plan, int size, const HeadGroups& heads, int counters,
                                       cudaStream_t stream) {
  const TilingSizes sizes[] = {{Side::query, size, FullTiles::from_end, Items::forward}};
  Made made = make_tiles(plan, sizes, heads, counters, stream);
  const TilingJob& tiling = made.jobs.tiles.tilings[0];
  return {std::move(made.memory), items_of<ForwardItem>(tiling, &tiling.state->count), heads_of(made.jobs),
          made.jobs.counters};
}

DeviceBackwardTiles build_backward_tiles(DevicePlan& plan, const BackwardSizes& sizes, const HeadGroups& heads,
                                         cudaStream_t stream) {
  constexpr FullTiles kFull = FullTiles::from_begin;
  const int size = 1 << sizes.log2_size;
  // The items of dQ, whole query tiles, begin where the runs do, as query tiles.
  const TilingSizes all[] = {{Side::query, size, kFull, Items::none},
                             {Side::key, sizes.keys, kFull, Items::keys},
                             {Side::query, size * sizes.dq_tiles, kFull, Items::dq}};
  Made made = make_tiles(plan, {all, sizes.dq_tiles > 0 ? 3u : 2u}, heads, 0, stream);
  const TilingJob &rows = made.jobs.tiles.tilings[0], &keys = made.jobs.tiles.tilings[1];
  DeviceBackwardTiles tiles{.memory = std::move(made.memory),
                            .rows = rows.ranges,
                            .most_rows = rows.most,
                            .row_count = &rows.state->count,
                            .keys = items_of<int4>(keys, &keys.state->active),
                            .unseen = keys.unseen,
                            .dq = {},
                            .heads = heads_of(made.jobs)};
  if (sizes.dq_tiles > 0) {
    const TilingJob& dq = made.jobs.tiles.tilings[2];
    tiles.dq = items_of<DqItem>(dq, &dq.state->count);
  }
  return tiles;
}

Index mean_rows_of(DevicePlan& plan) { return plan.data().q_rows / max_of(1, plan.data().query_ranges); }

}  // namespace weft::cuda::sm90
