#include "cuda/launch.h"
#include "plan/cuda/work.h"
#include "plan/pairs.h"
#include "text.h"

namespace weft {

// What the two kernels share.
struct WorkArrays {
  const DeviceSlice* slices;
  const std::int32_t* slice_count;
  bool keys;
  int tile_rows, tiles;
  Index capacity;
  WorkList::State* state;
  int2* touched;  // of each tile: INT_MAX - first slice, last slice + 1; zeros: none
  std::int32_t *order, *count, *entries;
  TileRange* ranges;
  std::uint8_t* cost;
  Reporter reporter;

  __device__ int2 rows(const DeviceSlice& s) const {
    return keys ? int2{s.k_begin, s.k_end} : int2{s.q_begin, s.q_end};
  }
};

namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32, kCosts = 256;
constexpr int kTop = 0x7fffffff;

// The first and the last slice of each tile, so that a tile need not look at all of them.
__global__ void touch_tiles(const __grid_constant__ WorkArrays w) {
  const int count = *w.slice_count;
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < count; i += gridDim.x * blockDim.x) {
    const int2 rows = w.rows(w.slices[i]);
    const int last = min(w.tiles - 1, (rows.y - 1) / w.tile_rows);
    for (int t = rows.x / w.tile_rows; t <= last; ++t) {
      atomicMax(&w.touched[t].x, kTop - i);
      atomicMax(&w.touched[t].y, i + 1);
    }
  }
}

// Visible pairs of the slice whose row lies in the tile.
__device__ Index pairs_in_tile(const DeviceSlice& s, bool keys, int begin, int end) {
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

// Quarters of powers of two: 0 for nothing, otherwise 1 + 4·log2, so that 63 bits fit into 253 steps.
__device__ std::uint8_t cost_of(unsigned long long pairs) {
  if (pairs == 0) return 0;
  const int top = 63 - __clzll(static_cast<long long>(pairs));
  const int quarter = static_cast<int>(top >= 2 ? pairs >> (top - 2) & 3 : pairs << (2 - top) & 3);
  return static_cast<std::uint8_t>(1 + 4 * top + quarter);
}

// A counting sort of the tiles, dearest first.
__device__ void sort_tiles(const WorkArrays& w) {
  __shared__ int at[kCosts];
  for (int c = threadIdx.x; c < kCosts; c += kThreads) at[c] = 0;
  __syncthreads();
  for (int t = threadIdx.x; t < w.tiles; t += kThreads)
    atomicAdd(&at[*static_cast<volatile std::uint8_t*>(&w.cost[t])], 1);
  __syncthreads();
  if (threadIdx.x < 32) {  // a warp adds up, from the dearest on, 8 costs a lane
    constexpr int kEach = kCosts / 32;
    const int top = kCosts - 1 - static_cast<int>(threadIdx.x) * kEach;
    int own = 0;
    for (int c = 0; c < kEach; ++c) own += at[top - c];
    int sum = own;
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, sum, d);
      if (static_cast<int>(threadIdx.x) >= d) sum += other;
    }
    sum -= own;
    for (int c = 0; c < kEach; ++c) {
      const int n = at[top - c];
      at[top - c] = sum;
      if (top - c == 0) *w.count = sum;
      sum += n;
    }
  }
  __syncthreads();
  for (int t = threadIdx.x; t < w.tiles; t += kThreads)
    w.order[atomicAdd(&at[*static_cast<volatile std::uint8_t*>(&w.cost[t])], 1)] = t;
}

// A block a tile: its slices in rising order, and what they cost. The last block sorts the tiles.
__global__ void __launch_bounds__(kThreads) fill_tiles(const __grid_constant__ WorkArrays w) {
  __shared__ int base, arrived, warp_count[kWarps];
  __shared__ unsigned long long cost;
  const int tile = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int begin = tile * w.tile_rows;
  const int end = static_cast<int>(min_of(Index{begin} + w.tile_rows, kTop));
  const int2 touched = w.touched[tile];
  const int first = touched.y == 0 ? 0 : kTop - touched.x, last = touched.y;
  if (thread == 0) cost = 0;
  __syncthreads();
  int own = 0;
  unsigned long long pairs = 0;
  for (int i = first + thread; i < last; i += kThreads) {
    const DeviceSlice s = w.slices[i];
    const int2 rows = w.rows(s);
    if (rows.x >= end || rows.y <= begin) continue;
    ++own;
    pairs += static_cast<unsigned long long>(pairs_in_tile(s, w.keys, begin, end));
  }
  if (pairs > 0) atomicAdd(&cost, pairs);
  const int lane = thread % 32, warp = thread / 32;
  for (int d = 16; d > 0; d /= 2) own += __shfl_xor_sync(~0u, own, d);
  if (lane == 0) warp_count[warp] = own;
  __syncthreads();
  int count = 0;
  for (int n = 0; n < kWarps; ++n) count += warp_count[n];
  if (thread == 0) base = atomicAdd(&w.state->entries, count);
  __syncthreads();
  const int from = base;
  const bool fits = from >= 0 && Index{from} + count <= w.capacity;
  int written = from;
  for (int chunk = first; fits && chunk < last; chunk += kThreads) {
    const int i = chunk + thread;
    bool touches = false;
    if (i < last) {
      const int2 rows = w.rows(w.slices[i]);
      touches = rows.x < end && rows.y > begin;
    }
    const unsigned ballot = __ballot_sync(~0u, touches);
    __syncthreads();  // nobody reads the last chunk's counts any more
    if (lane == 0) warp_count[warp] = __popc(ballot);
    __syncthreads();
    int before = 0, all = 0;
    for (int n = 0; n < kWarps; ++n) {
      if (n < warp) before += warp_count[n];
      all += warp_count[n];
    }
    if (touches) w.entries[written + before + __popc(ballot & ((1u << lane) - 1))] = i;
    written += all;
  }
  if (thread == 0) {
    w.ranges[tile] = fits ? TileRange{from, from + count} : TileRange{0, 0};
    w.cost[tile] = fits && count > 0 ? max(std::uint8_t{1}, cost_of(cost)) : std::uint8_t{0};
    w.touched[tile] = {0, 0};
    if (!fits) w.reporter.report({Fault::few_slices, w.keys ? 1 : 0, 0, Index{from} + count, w.capacity});
    __threadfence();
    arrived = atomicAdd(&w.state->done, 1);
  }
  __syncthreads();
  if (arrived != w.tiles - 1) return;
  __threadfence();
  sort_tiles(w);
  if (thread == 0) *w.state = {0, 0};
}

}  // namespace

WorkList::WorkList(detail::ContextParts& context, WorkSide side, Index rows, int tile_rows, Index capacity)
    : context_(&context), side_(side), tile_rows_(tile_rows), capacity_(capacity) {
  if (tile_rows < 1 || rows < 0 || rows > kMaxTokens || capacity < 0 || capacity > kMaxTokens)
    throw Error(text("a work list of ", rows, " rows in tiles of ", tile_rows, " with room for ", capacity, " entries"),
                text("give tiles of 1 row or more, and numbers up to ", kMaxTokens));
  tiles_ = static_cast<int>(ceil_div(rows, tile_rows));
  const cudaStream_t stream = context.stream();
  const auto n = static_cast<std::size_t>(max_of(1, tiles_));
  state_ = {1, stream};
  touched_ = {n, stream};
  order_ = {n, stream};
  count_ = {1, stream};
  slices_ = {static_cast<std::size_t>(max_of(1, capacity)), stream};
  ranges_ = {n, stream};
  cost_ = {n, stream};
  WEFT_CUDA(cudaMemsetAsync(state_.get(), 0, sizeof(State), stream));
  WEFT_CUDA(cudaMemsetAsync(touched_.get(), 0, n * sizeof(int2), stream));
  WEFT_CUDA(cudaMemsetAsync(count_.get(), 0, sizeof(std::int32_t), stream));
}

void WorkList::build(const DeviceSlices& slices) {
  context_->enter();
  const WorkArrays arrays{.slices = slices.slices,
                          .slice_count = slices.count,
                          .keys = side_ == WorkSide::keys,
                          .tile_rows = tile_rows_,
                          .tiles = tiles_,
                          .capacity = capacity_,
                          .state = state_.get(),
                          .touched = touched_.get(),
                          .order = order_.get(),
                          .count = count_.get(),
                          .entries = slices_.get(),
                          .ranges = ranges_.get(),
                          .cost = cost_.get(),
                          .reporter = context_->reporter()};
  // The count is the device's: enough threads for most plans, more slices go around.
  constexpr Index kBlocks = 264;
  const Index blocks = min_of(kBlocks, ceil_div(max_of(1, slices.capacity), kThreads));
  cuda::launch(touch_tiles, {.blocks = dim3(static_cast<unsigned>(blocks)), .threads = dim3(kThreads)},
               context_->stream(), arrays);
  cuda::launch(fill_tiles, {.blocks = dim3(static_cast<unsigned>(tiles_)), .threads = dim3(kThreads)},
               context_->stream(), arrays);
}

DeviceWork WorkList::view() const {
  return {tile_rows_, tiles_, order_.get(), count_.get(), ranges_.get(), slices_.get()};
}

}  // namespace weft
