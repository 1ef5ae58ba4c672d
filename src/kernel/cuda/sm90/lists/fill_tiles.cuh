// The third launch: the slices of each tile, and when all tiles of a tiling have theirs, its items in the order of
// work.
#pragma once

#include "kernel/cuda/sm90/lists/tile_job.cuh"
#include "kernel/cuda/sm90/ptx/ptx.cuh"

namespace weft::cuda::sm90 {

// What the tile's rows of a slice meet on the other side. A tile with few rows iterates as far as a full one.
__device__ inline Index rows_met(const WorkSlice& s, int side, int begin, int end) {
  Slice in_tile{s.q_begin, s.q_end, s.k_begin, s.k_end, s.lo, s.hi};
  Index& first = side == 0 ? in_tile.q_begin : in_tile.k_begin;
  Index& last = side == 0 ? in_tile.q_end : in_tile.k_end;
  first = max_of(first, begin);
  last = min_of(last, end);
  const Slice t = trimmed(in_tile, true);
  if (t.q_begin >= t.q_end) return 0;
  return side == 0 ? t.k_end - t.k_begin : t.q_end - t.q_begin;
}

// WorkSlice::tile_shift of a slice.
__device__ inline int shift_of(const TilingJob& rows, int row) {
  const int begin = rows.index.run_of(row);
  return rows.index.tile_of(begin) * rows.size - begin;
}

// The first and the one past the last of the slices that may touch a tile.
__device__ inline int2 slices_near(const SideMarks& side, int begin, int end) {
  int2 range = {kTop, 0};
  for (int w = begin / kWordRows; w <= (end - 1) / kWordRows; ++w) {
    const int2 touched = side.touched[w];
    if (touched.y == 0) continue;
    range = {min(range.x, kTop - touched.x), max(range.y, touched.y)};
  }
  return range.y == 0 ? int2{0, 0} : range;
}

struct FillMemory {
  int warp_count[kListWarps];
  unsigned arrived;
  unsigned long long base, cost;
};

// The slices that touch a tile, in ascending order, go to [from, from + count); the block has counted them.
__device__ inline void copy_slices(const TilesJob& job, const TilingJob& list, const int2& near, int begin, int end,
                                   int from, FillMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  int written = from;
  for (int chunk = near.x; chunk < near.y; chunk += kListThreads) {
    const int i = chunk + thread;
    WorkSlice s{};
    if (i < near.y) s = job.slice(i);
    const int2 rows = TilesJob::rows_of(s, list.side);
    const bool mine = s.q_begin < s.q_end && rows.x < end && rows.y > begin;
    const unsigned ballot = __ballot_sync(kAllLanes, mine);
    __syncthreads();  // all threads have read the previous chunk's counts
    if (lane == 0) memory.warp_count[warp] = __popc(ballot);
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < kListWarps; ++w) {
      if (w < warp) before += memory.warp_count[w];
      all += memory.warp_count[w];
    }
    if (mine) {
      if (list.kind == Items::keys) s.tile_shift = shift_of(job.tilings[0], s.q_begin);
      list.slices[written + before + __popc(ballot & ((1u << lane) - 1))] = s;
    }
    written += all;
  }
}

// By one block: the slices of a tile, and what it costs. Returns whether all tiles of the tiling now have theirs.
__device__ inline bool fill_tile(const TilesJob& job, const TilingJob& list, int tile, bool fails, FillMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int2 range = list.range(tile);
  const int begin = range.x, end = range.y;
  const int2 near = fails ? int2{0, 0} : slices_near(job.sides[list.side], begin, end);
  __syncthreads();  // the previous tile's numbers have been read
  if (thread == 0) memory.cost = 0;
  __syncthreads();
  int own = 0;
  unsigned long long met = 0;
  for (int i = near.x + thread; i < near.y; i += kListThreads) {
    const WorkSlice s = job.slice(i);
    const int2 rows = TilesJob::rows_of(s, list.side);
    if (s.q_begin >= s.q_end || rows.x >= end || rows.y <= begin) continue;
    ++own;
    met += static_cast<unsigned long long>(rows_met(s, list.side, begin, end));
  }
  if (met > 0) atomicAdd(&memory.cost, met);
  for (int d = 16; d > 0; d /= 2) own += __shfl_xor_sync(kAllLanes, own, d);
  if (lane == 0) memory.warp_count[warp] = own;
  __syncthreads();
  int count = 0;
  for (int w = 0; w < kListWarps; ++w) count += memory.warp_count[w];
  ListState& state = list.state->list;
  if (thread == 0) memory.base = count == 0 ? 0 : atomicAdd(&state.entries, static_cast<unsigned long long>(count));
  __syncthreads();
  const bool fits = memory.base + static_cast<unsigned>(count) <= static_cast<unsigned long long>(list.capacity);
  const int from = fits ? static_cast<int>(memory.base) : 0;
  if (fits && count > 0) copy_slices(job, list, near, begin, end, from, memory);
  __threadfence();
  __syncthreads();
  if (thread == 0) {
    list.members[tile] = fits ? int2{from, from + count} : int2{0, 0};
    // Tiles of a run follow each other in the order of work.
    const int first = count > 0 ? list.index.tile_of(list.index.run_of(begin)) : tile;
    list.first[tile] = first;
    if (count > 0) atomicMax(&list.costs[first], max(1, static_cast<int>(cost_of(memory.cost))));
    __threadfence();
    memory.arrived = atomicAdd(&state.done, 1u);
  }
  __syncthreads();
  const bool last = memory.arrived == static_cast<unsigned>(list.state->count) - 1;
  if (last) __threadfence();
  return last;
}

// By one warp: numbers of tiles of each cost become those before, from the most expensive on and warp after warp.
// Returns the number of tiles that cost something. 8 costs per lane.
__device__ inline int sum_before(int (&at)[kListWarps][kCosts]) {
  constexpr int kEach = kCosts / 32;
  const int lane = static_cast<int>(threadIdx.x % 32), top = kCosts - 1 - lane * kEach;
  int counts[kEach][kListWarps], own = 0;  // all are loaded before the first is used
#pragma unroll
  for (int c = 0; c < kEach; ++c)
#pragma unroll
    for (int w = 0; w < kListWarps; ++w) counts[c][w] = at[w][top - c];
#pragma unroll
  for (int c = 0; c < kEach; ++c)
#pragma unroll
    for (int w = 0; w < kListWarps; ++w) own += counts[c][w];
  int sum = own;
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(kAllLanes, sum, d);
    if (lane >= d) sum += other;
  }
  sum -= own;
  int first_free = 0;
#pragma unroll
  for (int c = 0; c < kEach; ++c) {
    if (top - c == 0) first_free = sum;
#pragma unroll
    for (int w = 0; w < kListWarps; ++w) {
      at[w][top - c] = sum;
      sum += counts[c][w];
    }
  }
  return __shfl_sync(kAllLanes, first_free, 31);
}

// By one block: sorts the tiles by the cost of their run's most expensive tile, and leaves tiles of equal cost, so also
// those of a run, in their order: the first keys of a causal document are seen most, and its last rows see most, so
// queries go backwards. A stable counting sort: each warp has a range of tiles. `none`: no tile has slices. Returns the
// number of tiles that have some, which come first.
__device__ inline int sort_tiles(const TilingJob& list, int tiles, bool none) {
  __shared__ int at[kListWarps][kCosts];
  __shared__ int active;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int each = (tiles + kListThreads - 1) / kListThreads * 32;
  const int begin = min(warp * each, tiles), end = min(begin + each, tiles);
  const auto tile_at = [&](int n) { return list.kind == Items::keys ? n : tiles - 1 - n; };
  for (int i = thread; i < kListWarps * kCosts; i += kListThreads) at[i / kCosts][i % kCosts] = 0;
  __syncthreads();
  for (int n = begin + lane; n < end; n += 32) {
    const int t = tile_at(n);
    const int cost = none ? 0 : __ldcg(&list.costs[__ldcg(&list.first[t])]);
    list.cost[t] = static_cast<std::uint8_t>(cost);
    atomicAdd(&at[warp][cost], 1);
  }
  __syncthreads();
  if (warp == 0) active = sum_before(at);
  __syncthreads();
  for (int n = begin; n < end; n += 32) {
    const bool valid = n + lane < end;
    const int t = tile_at(valid ? n + lane : n), cost = valid ? list.cost[t] : -1;
    const unsigned equals = __match_any_sync(kAllLanes, cost), before = equals & ((1u << lane) - 1);
    if (valid) list.order[at[warp][cost] + __popc(before)] = t;
    __syncwarp();
    if (valid && before == 0) at[warp][cost] += __popc(equals);
    __syncwarp();
  }
  __syncthreads();
  return active;
}

// The n-th item in the order of work.
__device__ inline void write_item(const TilesJob& job, const TilingJob& list, int n, int active, bool none) {
  const int tile = list.order[n];
  const int2 range = list.range(tile), members = none ? int2{0, 0} : __ldcg(&list.members[tile]);
  if (list.kind == Items::forward) {
    ForwardItem item{tile, range.x, range.y, members.x, members.y, 0, {}, {}};
    if (members.x < members.y) {
      const int4* from = reinterpret_cast<const int4*>(list.slices + members.x);
      int4* to = reinterpret_cast<int4*>(&item.slice);
      to[0] = __ldcg(from), to[1] = __ldcg(from + 1);
    }
    static_cast<ForwardItem*>(list.items)[n] = item;
  } else if (list.kind == Items::keys) {
    if (n < active)
      static_cast<int4*>(list.items)[n] = {range.x, range.y, members.x, members.y};
    else
      list.unseen[n - active] = range;
  } else {
    const int first = none ? 0 : job.tilings[0].index.tile_of(range.x);
    static_cast<DqItem*>(list.items)[n] = {range.x, range.y, members.x, members.y, first};
  }
}

// By one block, after all tiles have their slices.
__device__ inline void finish_tiling(const TilesJob& job, const TilingJob& list, bool fails) {
  const int thread = static_cast<int>(threadIdx.x), tiles = list.state->count;
  const unsigned long long entries = *static_cast<volatile unsigned long long*>(&list.state->list.entries);
  const bool few = entries > static_cast<unsigned long long>(list.capacity), none = few || fails;
  if (few && thread == 0)
    job.reporter.report({OffsetFault::few_slices, list.side, 0, static_cast<Index>(entries), list.capacity});
  const int active = sort_tiles(list, tiles, none);
  for (int n = thread; n < tiles; n += kListThreads) write_item(job, list, n, active, none);
  if (thread == 0) list.state->active = active;
}

// Blocks take tiles of all tilings that have lists in turn.
__global__ void __launch_bounds__(kListThreads) fill_tiles(const __grid_constant__ TilesJob job) {
  __shared__ FillMemory memory;
  griddepcontrol_wait();
  const bool fails = job.fails();
  int before = 0;  // tiles of earlier tilings
  for (int n = 0; n < job.tiling_count; ++n) {
    const TilingJob& list = job.tilings[n];
    if (list.kind == Items::none) continue;
    const int tiles = list.state->count, grid = static_cast<int>(gridDim.x);
    // The first tile of this block: those of a tiling go on where those of the one before end.
    const int ahead = before % grid, own = static_cast<int>(blockIdx.x);
    for (Index tile = own >= ahead ? own - ahead : own - ahead + grid; tile < tiles; tile += grid)
      if (fill_tile(job, list, static_cast<int>(tile), fails, memory)) finish_tiling(job, list, fails);
    before = (ahead + tiles) % grid;
  }
}

}  // namespace weft::cuda::sm90
