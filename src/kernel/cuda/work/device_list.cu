#include "cuda/launch.h"
#include "kernel/cuda/work/device_list.cuh"
#include "plan/visible_pairs.h"
#include "text.h"

namespace weft::cuda {
namespace {

constexpr int kThreads = kListThreads, kWarps = kListWarps, kMostLists = 2;
constexpr unsigned kAll = kAllLanes;

// One list in the making. `state` and `touched` start as zeros.
struct ListJob {
  bool keys;
  int size, tiles;
  Index capacity;
  ListState* state;
  int2* touched;  // of each tile: kTop - first slice, last slice + 1; zeros: no slice
  WorkSlice* slices;
  int2* ranges;
  int *order, *count;
  std::uint8_t* cost;

  __device__ int2 rows(const WorkSlice& s) const { return keys ? int2{s.k_begin, s.k_end} : int2{s.q_begin, s.q_end}; }
  // First tile of a slice, and the one past its last; both 0 for slices that show nothing.
  __device__ int2 tiles_of(const WorkSlice& s) const {
    if (s.q_begin >= s.q_end) return {0, 0};
    const int2 r = rows(s);
    return {r.x / size, min(tiles, (r.y - 1) / size + 1)};
  }
};

struct Job {
  const DeviceSlice* slices;
  const std::int32_t* slice_count;
  Index q_rows, k_rows;
  int lists;
  ListJob list[kMostLists];
  Reporter reporter;

  // Unlimited bounds need no special case: no sum of one and a row falls within the rectangle.
  __device__ WorkSlice slice(int i) const {
    const DeviceSlice s = slices[i];
    return work_slice_within({s.q_begin, s.q_end, s.k_begin, s.k_end, s.lo, s.hi}, q_rows, k_rows);
  }
};

// The first and the last slice of each tile, so that a tile need not look at all slices. One thread per slice; the
// whole warp where a slice has many tiles. The last block writes the heads.
__global__ void __launch_bounds__(kThreads)
    touch_tiles(const __grid_constant__ Job job, const __grid_constant__ HeadJob heads) {
  if (blockIdx.x == gridDim.x - 1) return write_heads(heads);
  constexpr int kAlone = 4;
  const int count = *job.slice_count, lane = static_cast<int>(threadIdx.x % 32);
  const Index step = static_cast<Index>(gridDim.x - 1) * kThreads;
  for (Index first = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x - lane; first < count; first += step) {
    const int own = static_cast<int>(min_of(first + lane, count - 1));
    const WorkSlice slice = job.slice(own);
    for (int n = 0; n < job.lists; ++n) {
      const ListJob& list = job.list[n];
      const auto mark = [&](int i, int begin, int end, int stride) {
        for (int t = begin; t < end; t += stride) {
          atomicMax(&list.touched[t].x, kTop - i);
          atomicMax(&list.touched[t].y, i + 1);
        }
      };
      const int2 tiles = first + lane < count ? list.tiles_of(slice) : int2{0, 0};
      mark(own, tiles.x, min(tiles.y, tiles.x + kAlone), 1);
      for (unsigned more = __ballot_sync(kAll, tiles.y - tiles.x > kAlone); more != 0; more &= more - 1) {
        const int from = __ffs(static_cast<int>(more)) - 1;
        const int begin = __shfl_sync(kAll, tiles.x, from) + kAlone, end = __shfl_sync(kAll, tiles.y, from);
        mark(static_cast<int>(first) + from, begin + lane, end, 32);
      }
    }
  }
}

// Visible pairs of the slice in rows [begin, end) of the list's side.
__device__ Index pairs_in_tile(const WorkSlice& s, bool keys, int begin, int end) {
  Slice wide{s.q_begin, s.q_end, s.k_begin, s.k_end, s.lo, s.hi};
  if (keys) {
    wide.k_begin = max(s.k_begin, begin);
    wide.k_end = min(s.k_end, end);
  } else {
    wide.q_begin = max(s.q_begin, begin);
    wide.q_end = min(s.q_end, end);
  }
  return visible_pairs(wide, Run{0, wide.q_begin, wide.q_end - wide.q_begin, 1});
}

// A counting sort of the tiles, most expensive first.
__device__ void sort_tiles(const ListJob& list) {
  __shared__ int at[kCosts];
  const auto cost = [&](int t) { return *static_cast<volatile std::uint8_t*>(&list.cost[t]); };
  for (int c = threadIdx.x; c < kCosts; c += kThreads) at[c] = 0;
  __syncthreads();
  for (int t = threadIdx.x; t < list.tiles; t += kThreads) atomicAdd(&at[cost(t)], 1);
  __syncthreads();
  if (threadIdx.x < 32) {  // a prefix sum by one warp, from the most expensive on, 8 costs per lane
    constexpr int kEach = kCosts / 32;
    const int top = kCosts - 1 - static_cast<int>(threadIdx.x) * kEach;
    int own = 0;
    for (int c = 0; c < kEach; ++c) own += at[top - c];
    int sum = own;
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(kAll, sum, d);
      if (static_cast<int>(threadIdx.x) >= d) sum += other;
    }
    sum -= own;
    for (int c = 0; c < kEach; ++c) {
      const int n = at[top - c];
      at[top - c] = sum;
      sum += n;
    }
  }
  __syncthreads();
  for (int t = threadIdx.x; t < list.tiles; t += kThreads) list.order[atomicAdd(&at[cost(t)], 1)] = t;
}

// By one block, after all tiles have their slices.
__device__ void finish(const ListJob& list, const Reporter& reporter) {
  const unsigned long long entries = *static_cast<volatile unsigned long long*>(&list.state->entries);
  if (threadIdx.x == 0) *list.count = list.tiles;
  if (entries > static_cast<unsigned long long>(list.capacity)) {
    for (int t = threadIdx.x; t < list.tiles; t += kThreads) list.ranges[t] = {0, 0};
    if (threadIdx.x == 0)
      reporter.report({OffsetFault::few_slices, list.keys ? 1 : 0, 0, static_cast<Index>(entries), list.capacity});
  }
  sort_tiles(list);
}

// One block per tile: its slices in ascending order, and their cost.
__global__ void __launch_bounds__(kThreads) fill_tiles(const __grid_constant__ Job job) {
  __shared__ int warp_count[kWarps];
  __shared__ unsigned arrived;
  __shared__ unsigned long long base, cost;
  const int n = static_cast<int>(blockIdx.x) < job.list[0].tiles ? 0 : 1;
  const ListJob& list = job.list[n];
  const int tile = static_cast<int>(blockIdx.x) - (n == 0 ? 0 : job.list[0].tiles);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int begin = tile * list.size;
  const int end = static_cast<int>(min_of(Index{begin} + list.size, kTop));
  const int2 touched = list.touched[tile];
  const int first = touched.y == 0 ? 0 : kTop - touched.x, last = touched.y;
  const auto touches = [&](const WorkSlice& s) {
    const int2 rows = list.rows(s);
    return s.q_begin < s.q_end && rows.x < end && rows.y > begin;
  };
  if (thread == 0) cost = 0;
  __syncthreads();
  int own = 0;
  unsigned long long pairs = 0;
  for (int i = first + thread; i < last; i += kThreads) {
    const WorkSlice s = job.slice(i);
    if (!touches(s)) continue;
    ++own;
    pairs += static_cast<unsigned long long>(pairs_in_tile(s, list.keys, begin, end));
  }
  if (pairs > 0) atomicAdd(&cost, pairs);
  for (int d = 16; d > 0; d /= 2) own += __shfl_xor_sync(kAll, own, d);
  if (lane == 0) warp_count[warp] = own;
  __syncthreads();
  int count = 0;
  for (int w = 0; w < kWarps; ++w) count += warp_count[w];
  if (thread == 0) base = count == 0 ? 0 : atomicAdd(&list.state->entries, static_cast<unsigned long long>(count));
  __syncthreads();
  const bool fits = base + static_cast<unsigned>(count) <= static_cast<unsigned long long>(list.capacity);
  const int from = fits ? static_cast<int>(base) : 0;
  int written = from;
  for (int chunk = first; fits && count > 0 && chunk < last; chunk += kThreads) {
    const int i = chunk + thread;
    WorkSlice s{};
    if (i < last) s = job.slice(i);
    const bool mine = i < last && touches(s);
    const unsigned ballot = __ballot_sync(kAll, mine);
    __syncthreads();  // all threads have read the previous chunk's counts
    if (lane == 0) warp_count[warp] = __popc(ballot);
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += warp_count[w];
      all += warp_count[w];
    }
    if (mine) list.slices[written + before + __popc(ballot & ((1u << lane) - 1))] = s;
    written += all;
  }
  if (thread == 0) {
    list.ranges[tile] = fits ? int2{from, from + count} : int2{0, 0};
    list.cost[tile] = count > 0 ? max(std::uint8_t{1}, cost_of(cost)) : std::uint8_t{0};
    __threadfence();
    arrived = atomicAdd(&list.state->done, 1u);
  }
  __syncthreads();
  if (arrived != static_cast<unsigned>(list.tiles) - 1) return;
  __threadfence();
  finish(list, job.reporter);
}

struct Jobs {
  Job lists;
  HeadJob heads;
  std::size_t zeros, numbers;  // ints to be zeroed, and ints in all
};

Jobs place_jobs(detail::DevicePlanData& plan, std::span<const Tiling> tilings, const HeadGroups& heads, int* memory) {
  Jobs jobs{};
  Room room(memory);
  jobs.lists.slices = plan.slices.get();
  jobs.lists.slice_count = plan.count.get();
  jobs.lists.q_rows = plan.q_rows;
  jobs.lists.k_rows = plan.k_rows;
  jobs.lists.lists = static_cast<int>(tilings.size());
  jobs.lists.reporter = plan.context->reporter();
  for (std::size_t n = 0; n < tilings.size(); ++n) {
    const Tiling& tiling = tilings[n];
    ListJob& list = jobs.lists.list[n];
    list.keys = tiling.side == Side::key;
    list.size = tiling.size;
    list.tiles = tiling.tiles();
    list.capacity = work_capacity(plan.capacity, list.tiles, list.keys ? plan.per_key : plan.per_row);
    list.state = room.take<ListState>(1);
    list.touched = room.take<int2>(list.tiles);
  }
  jobs.zeros = room.used();
  for (std::size_t n = 0; n < tilings.size(); ++n) {
    ListJob& list = jobs.lists.list[n];
    list.slices = room.take<WorkSlice>(list.capacity);
    list.ranges = room.take<int2>(list.tiles);
    list.order = room.take<int>(list.tiles);
    list.count = room.take<int>(1);
    list.cost = room.take<std::uint8_t>(list.tiles);
  }
  place_heads(jobs.heads, heads, room);
  jobs.numbers = room.used();
  return jobs;
}

}  // namespace

void place_heads(HeadJob& job, const HeadGroups& heads, Room& room) {
  job.heads_q = static_cast<int>(heads.heads_q);
  job.heads_k = static_cast<int>(heads.heads_k);
  job.mapped = !heads.map.empty();
  for (std::size_t i = 0; i < heads.map.size(); ++i) job.map[i] = static_cast<std::uint16_t>(heads.map[i]);
  job.kv_head = room.take<int>(heads.heads_q);
  job.begin = room.take<int>(heads.heads_k + 1);
  job.heads = room.take<int>(heads.heads_q);
}

void check_sizes(const detail::DevicePlanData& plan, std::span<const Tiling> tilings, const HeadGroups& heads) {
  if (!heads.map.empty() && (heads.heads_q > HeadJob::kMostMapped || heads.heads_k > HeadJob::kMostKeyHeads))
    throw Error(text("a head_map of ", heads.heads_q, " query heads onto ", heads.heads_k, " with a device_plan"),
                text("give at most ", HeadJob::kMostMapped, " and ", HeadJob::kMostKeyHeads,
                     " at a time, or slices on the host"));
  for (const Tiling& t : tilings) {
    const Index entries = work_capacity(plan.capacity, t.tiles(), t.side == Side::key ? plan.per_key : plan.per_row);
    if (entries > kMaxTokens)
      throw Error(text("a device_plan with room for ", plan.capacity, " slices over ", t.tiles(), " tiles of ",
                       t.side == Side::key ? "keys" : "queries", " may have ", entries, " entries of tiles"),
                  "use keys in sequence order, fewer rows, or slices on the host");
  }
}

WorkLists build_lists(DevicePlan& plan, std::span<const Tiling> tilings, const HeadGroups& heads, cudaStream_t stream) {
  detail::DevicePlanData& data = plan.data();
  data.context->enter();
  check_sizes(data, tilings, heads);
  const std::size_t numbers = place_jobs(data, tilings, heads, nullptr).numbers;
  WorkLists made{StreamArray<int>(numbers, stream), {}, {}};
  const Jobs jobs = place_jobs(data, tilings, heads, made.memory.get());
  if (jobs.zeros > 0) WEFT_CUDA(cudaMemsetAsync(made.memory.get(), 0, jobs.zeros * sizeof(int), stream));
  // Only the device knows the number of slices: threads for most plans, which loop over more.
  constexpr Index kBlocks = 264;
  const Index blocks = min_of(kBlocks, ceil_div(data.capacity, kThreads));
  launch(&touch_tiles, {dim3(static_cast<unsigned>(blocks) + 1), dim3(kThreads), 0}, stream, jobs.lists, jobs.heads);
  unsigned tiles = 0;
  for (int n = 0; n < jobs.lists.lists; ++n) tiles += static_cast<unsigned>(jobs.lists.list[n].tiles);
  launch(&fill_tiles, {dim3(tiles), dim3(kThreads), 0}, stream, jobs.lists);
  for (int n = 0; n < jobs.lists.lists; ++n) {
    const ListJob& list = jobs.lists.list[n];
    made.lists.push_back({list.slices, list.ranges, list.order, list.count});
  }
  made.heads = {jobs.heads.kv_head, jobs.heads.begin, jobs.heads.heads};
  return made;
}

}  // namespace weft::cuda
