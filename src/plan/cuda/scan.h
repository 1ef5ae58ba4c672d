// Count, scan, emit: for each sequence, in one launch, in the order of the sequences.
//
// Blocks take tickets, so that a block waits only for blocks that have started. Each publishes the sum of its own
// sequences, then adds up what all blocks before it published. There are few blocks, so every block reads all of them
// at once, which costs one round trip to the L2 cache instead of a chain of them.
#pragma once

#include "cuda/launch.h"
#include "plan/cuda/context.h"
#include "plan/device_runs.h"
#include "plan/offset_faults.h"

namespace weft {

inline constexpr int kScanThreads = 128;

template <int N>
struct Sums {
  int v[N] = {};

  __device__ void operator+=(const Sums& other) {
    for (int n = 0; n < N; ++n) v[n] += other.v[n];
  }
};

// Sums of all threads before this one, and of all threads. All threads of the block must call it.
template <int N>
__device__ Sums<N> block_scan(const Sums<N>& own, Sums<N>& all) {
  __shared__ int warps[N][kScanThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Sums<N> scan = own;
  for (int n = 0; n < N; ++n) {
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, scan.v[n], d);
      if (lane >= d) scan.v[n] += other;
    }
    if (lane == 31) warps[n][warp] = scan.v[n];
  }
  __syncthreads();
  Sums<N> before;
  for (int n = 0; n < N; ++n) {
    before.v[n] = scan.v[n] - own.v[n];
    all.v[n] = 0;
    for (int w = 0; w < kScanThreads / 32; ++w) {
      if (w < warp) before.v[n] += warps[n][w];
      all.v[n] += warps[n][w];
    }
  }
  __syncthreads();
  return before;
}

template <int N>
__device__ Sums<N> exchange(ScanState* state, unsigned block, unsigned launch, const Sums<N>& own) {
  if (threadIdx.x < N)
    atomicExch(&state->sums[threadIdx.x][block],
               static_cast<unsigned long long>(launch) << 32 | static_cast<unsigned>(own.v[threadIdx.x]));
  Sums<N> read, all;
  for (unsigned b = threadIdx.x; b < block; b += kScanThreads) {
    for (int n = 0; n < N; ++n) {
      const volatile unsigned long long* from = &state->sums[n][b];
      unsigned long long word = *from;
      while (static_cast<unsigned>(word >> 32) != launch) {
        __nanosleep(32);  // leaves the memory bandwidth to the blocks that are waited for
        word = *from;
      }
      read.v[n] += static_cast<int>(word);
    }
  }
  block_scan(read, all);
  return all;
}

// A Job has kSums, the types Shared and Cache (of a thread, from counting to emitting), sequences(), per_tile() and
//   load(shared, first, count): loads the offsets of some sequences, by all threads;
//   visit(shared, cache, first, count, emitting, before) -> Sums: counts this thread's entries, and writes if emitting;
//   finish(state): runs in one block, after all have written.
template <class Job>
__global__ void __launch_bounds__(kScanThreads)
    scan_sequences(const __grid_constant__ Job job, ScanState* state, int tiles_per_block) {
  __shared__ typename Job::Shared shared;
  __shared__ unsigned ticket, launch, arrived;
  if (threadIdx.x == 0) {
    launch = *static_cast<volatile unsigned*>(&state->launches) + 1;
    ticket = atomicAdd(&state->ticket, 1u);
  }
  __syncthreads();
  using Total = Sums<Job::kSums>;
  const int all_tiles = (job.sequences() + job.per_tile() - 1) / job.per_tile();
  const int first = static_cast<int>(ticket) * tiles_per_block;
  const int tiles = max(0, min(all_tiles, first + tiles_per_block) - first);
  // Count every tile; then, knowing the sums before, count and emit tile by tile. A single tile is still loaded and
  // counted when it is emitted. One loop for all of it, because a planner is a lot of code.
  const int steps = tiles == 1 ? 2 : 3 * tiles;
  Total own, before, in_tile, tile_total;
  typename Job::Cache cache;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const bool counted = step >= tiles;
    const int tile = !counted ? step : tiles == 1 ? 0 : (step - tiles) / 2;
    const bool emitting = counted && (tiles == 1 || (step - tiles) % 2 == 1);
    if (step == tiles) before = exchange(state, ticket, launch, own);
    const int from = (first + tile) * job.per_tile(), n = min(job.per_tile(), job.sequences() - from);
    if (!emitting) {
      job.load(shared, from, n);
      __syncthreads();
    }
    Total at = before;
    at += in_tile;
    const Total mine = job.visit(shared, cache, from, n, emitting, at);
    if (emitting) {
      before += tile_total;
    } else {
      in_tile = block_scan(mine, tile_total);
      if (!counted) own += tile_total;
    }
    __syncthreads();  // before `shared` is loaded again
  }
  if (tiles == 0) before = exchange(state, ticket, launch, own);
  if (ticket == gridDim.x - 1 && threadIdx.x < Job::kSums)
    state->total[threadIdx.x] = static_cast<unsigned>(before.v[threadIdx.x]);  // by now including the block's own
  // Makes this block's writes visible to the last block, which finishes and resets the counters.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) arrived = atomicAdd(&state->done, 1u);
  __syncthreads();
  if (arrived != gridDim.x - 1) return;
  __threadfence();
  job.finish(*state);
  __syncthreads();
  if (threadIdx.x == 0) {
    state->ticket = state->done = 0;
    state->worst = 0;
    state->longest[0] = state->longest[1] = 0;
    state->launches = launch;
  }
}

template <class Job>
void launch_scan(const Job& job, const detail::ContextData& context) {
  const int tiles = (job.sequences() + job.per_tile() - 1) / job.per_tile();
  const int tiles_per_block = (tiles + ScanState::kBlocks - 1) / ScanState::kBlocks;
  // Without sequences: one block, which writes an empty result.
  const int blocks = tiles == 0 ? 1 : (tiles + tiles_per_block - 1) / tiles_per_block;
  cuda::launch(scan_sequences<Job>, {.blocks = dim3(static_cast<unsigned>(blocks)), .threads = dim3(kScanThreads)},
               context.stream(), job, context.state.get(), tiles_per_block);
}

// --- The reported fault: that of the first sequence, so that the same offsets give the same message ---

__device__ inline void note_fault(ScanState* state, const OffsetFault& fault) {
  // Inverted, so that atomicMax keeps the first sequence and zero means none.
  const unsigned long long key = static_cast<unsigned long long>(fault.sequence) << 8 | fault.code << 1 | fault.keys;
  atomicMax(&state->worst, ~key);
}

// One side's offsets in shared memory, in the planner's form, for a tile of sequences.

template <int kSequences>
struct SharedSide {
  Index offsets[kSequences + 1];
  Index used[kSequences];
  Index begin, end;  // of all sequences

  __device__ Range extent() const { return {begin, end}; }
};

// Each thread loads and checks one sequence; `ok` becomes false for those that cannot be planned.
template <int kSequences>
__device__ void load_side(SharedSide<kSequences>& to, bool* ok, const OffsetsView& from, Index multiple, int keys,
                          ScanState* state, int first, int count) {
  const int t = static_cast<int>(threadIdx.x);
  if (t < count) {
    OffsetFault fault = find_offset_fault(from, first + t, multiple);
    fault.keys = keys;
    if (fault.code != OffsetFault::none) note_fault(state, fault);
    if (fault.code != OffsetFault::none) ok[t] = false;
    to.offsets[t] = from.offset(first + t);
    to.used[t] = from.at(from.cu, first + t + 1) - from.at(from.cu, first + t);
    // The end of each is the beginning of the next; only the last needs its own.
    if (t == count - 1) to.offsets[count] = from.offset(first + count);
  }
  if (t == kScanThreads - 1) {
    const Range extent = valid_extent(from.extent(), from.tokens);
    to.begin = extent.begin;
    to.end = extent.end;
  }
}

}  // namespace weft
