// The first two launches: marks where slices connect rows, then numbers the tiles.
#pragma once

#include "kernel/cuda/sm90/lists/tile_job.cuh"
#include "kernel/cuda/sm90/ptx/ptx.cuh"

namespace weft::cuda::sm90 {

// Rows begin .. end - 1 of a slice: a row joins the one before it if both are in it.
__device__ inline void mark_rows(const SideMarks& side, int begin, int end) {
  const int first = begin / kWordRows, last = (end - 1) / kWordRows, from = begin % kWordRows;
  const auto join = [&](int word, RowBits bits) {
    if (bits != 0) atomicOr(&side.joins[word], bits);
  };
  atomicOr(&side.begins[first], RowBits{1} << from);
  const int to = (end - 1) % kWordRows + 1;
  if (first == last) return join(first, bits_between(from + 1, to));
  join(first, bits_between(from + 1, kWordRows));
  join(last, bits_between(0, to));
  if (last == first + 1) return;
  atomicAdd(&side.covers[first + 1], 1);
  atomicAdd(&side.covers[last], -1);
}

// One thread per slice; where it touches many words, the whole warp notes that. The last block writes the heads.
__global__ void __launch_bounds__(kListThreads)
    mark_slices(const __grid_constant__ TilesJob job, const __grid_constant__ HeadJob heads) {
  griddepcontrol_launch_dependents();
  if (blockIdx.x == gridDim.x - 1) return write_heads(heads);
  constexpr int kAlone = 4;
  const int count = job.count(), lane = static_cast<int>(threadIdx.x % 32);
  const Index step = static_cast<Index>(gridDim.x - 1) * kListThreads;
  for (Index first = static_cast<Index>(blockIdx.x) * kListThreads + threadIdx.x - lane; first < count; first += step) {
    const int own = static_cast<int>(min_of(first + lane, count - 1));
    const WorkSlice slice = job.slice(own);
    const bool shown = first + lane < count && slice.q_begin < slice.q_end;
    for (int n = 0; n < job.side_count; ++n) {
      const SideMarks& side = job.sides[n];
      const auto touch = [&](int i, int begin, int end, int stride) {
        for (int w = begin; w < end; w += stride) {
          atomicMax(&side.touched[w].x, kTop - i);
          atomicMax(&side.touched[w].y, i + 1);
        }
      };
      int2 words = {0, 0};
      if (shown) {
        const int2 rows = TilesJob::rows_of(slice, n);
        mark_rows(side, rows.x, rows.y);
        words = {rows.x / kWordRows, (rows.y - 1) / kWordRows + 1};
      }
      touch(own, words.x, min(words.y, words.x + kAlone), 1);
      for (unsigned more = __ballot_sync(kAllLanes, words.y - words.x > kAlone); more != 0; more &= more - 1) {
        const int from = __ffs(static_cast<int>(more)) - 1;
        const int begin = __shfl_sync(kAllLanes, words.x, from) + kAlone, end = __shfl_sync(kAllLanes, words.y, from);
        touch(static_cast<int>(first) + from, begin + lane, end, 32);
      }
    }
  }
}

inline constexpr int kCutThreads = 1024;

struct Sum {
  __device__ int operator()(int a, int b) const { return a + b; }
};
struct Least {
  __device__ int operator()(int a, int b) const { return min(a, b); }
};
struct Greatest {
  __device__ int operator()(int a, int b) const { return max(a, b); }
};

// What `op` makes of the values of all threads before this one, or after it; `all`: of all threads. All threads of the
// block call it.
template <bool kAfter = false, class Op>
__device__ int scan_block(int own, int identity, const Op& op, int& all) {
  constexpr int kWarps = kCutThreads / 32;
  __shared__ int warps[kWarps];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const auto from = [&](int value, int distance) {
    return kAfter ? __shfl_down_sync(kAllLanes, value, distance) : __shfl_up_sync(kAllLanes, value, distance);
  };
  const int place = kAfter ? 31 - lane : lane;  // in the order of the scan
  int scan = own;
  for (int d = 1; d < 32; d *= 2) {
    const int other = from(scan, d);
    if (place >= d) scan = op(scan, other);
  }
  const int neighbour = from(scan, 1);
  int result = place == 0 ? identity : neighbour;
  if (place == 31) warps[warp] = scan;
  __syncthreads();
  all = identity;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (kAfter ? w > warp : w < warp) result = op(result, warps[w]);
    all = op(all, warps[w]);
  }
  __syncthreads();  // before `warps` is written again
  return result;
}

// Words first .. last - 1 of a thread.
struct OwnWords {
  int first, last;
  __device__ explicit OwnWords(int words) {
    const int each = (words + kCutThreads - 1) / kCutThreads;
    first = min(static_cast<int>(threadIdx.x) * each, words);
    last = min(first + each, words);
  }
};

// Bits of rows where runs begin, and of rows in slices. `first` and `last`: begins of the thread's first and last run,
// if it has any.
__device__ inline void find_runs(const SideMarks& side, const TilingJob& tiling, const OwnWords& own, int& first,
                                 int& last) {
  int covers = 0, all;
  for (int w = own.first; w < own.last; ++w) covers += __ldcg(&side.covers[w]);
  covers = scan_block(covers, 0, Sum{}, all);
  const auto bits = [&](int w, RowBits& joined, RowBits& held) {  // `covers`: including those of the word
    joined = __ldcg(&side.joins[w]) | (covers > 0 ? ~RowBits{0} : 0);
    held = joined | __ldcg(&side.begins[w]);
  };
  RowBits joined = 0, held = 0;
  if (own.first > 0 && own.first < own.last) bits(own.first - 1, joined, held);
  for (int w = own.first; w < own.last; ++w) {
    const RowBits row_before = held >> (kWordRows - 1);
    covers += __ldcg(&side.covers[w]);
    bits(w, joined, held);
    const int row = w * kWordRows;
    const RowBits begins =
        ~joined & (held | held << 1 | row_before | (w == 0 ? 1 : 0)) & bits_between(0, min(side.rows - row, kWordRows));
    tiling.runs[w] = begins;
    tiling.held[w] = held;
    if (begins == 0) continue;
    if (first == kTop) first = row + lowest_bit(begins);
    last = row + highest_bit(begins);
  }
}

// Tiles from row 0 on without slices, because there are more tiles than fit.
__device__ inline void cut_evenly(const TilesJob& job, const TilingJob& tiling, int rows, int needed) {
  const int count = (rows - 1) / tiling.size + 1;
  for (int t = static_cast<int>(threadIdx.x); t < count; t += kCutThreads) {
    const int end = min(rows - t * tiling.size, tiling.size) + t * tiling.size;
    tiling.ranges[t] = {t * tiling.size, tiling.full == FullTiles::from_end ? end : ~end};
    if (tiling.kind != Items::none) tiling.costs[t] = 0;
  }
  if (threadIdx.x != 0) return;
  tiling.state->count = count;
  tiling.state->too_many = 1;
  job.reporter.report({OffsetFault::few_slices, tiling.side, 0, needed, tiling.most});
}

// One block per tiling.
__global__ void __launch_bounds__(kCutThreads) cut_tiles(const __grid_constant__ TilesJob job) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const TilingJob& tiling = job.tilings[blockIdx.x];
  const SideMarks& side = job.sides[tiling.side];
  const OwnWords own(side.words);
  int first = kTop, last = -1, all;
  find_runs(side, tiling, own, first, last);
  // The last begin before the thread's words, and the first one after them.
  int run = scan_block(last, -1, Greatest{}, all);
  int next = min(scan_block<true>(first, kTop, Least{}, all), side.rows);
  for (int w = own.first; w < own.last; ++w) {
    tiling.run_before[w] = run;
    if (tiling.runs[w] != 0) run = w * kWordRows + highest_bit(tiling.runs[w]);
  }
  int count = 0;
  for (int w = own.last - 1; w >= own.first; --w) {
    const RowBits tiles = tiles_of_word(tiling.runs, w, tiling.run_before[w], next, tiling.size, tiling.full);
    tiling.tiles[w] = tiles;
    count += count_bits(tiles);
    if (tiling.runs[w] != 0) next = w * kWordRows + lowest_bit(tiling.runs[w]);
  }
  int tile = scan_block(count, 0, Sum{}, all);
  if (all > tiling.most) return cut_evenly(job, tiling, side.rows, all);
  const auto end_at = [&](int row) {
    const bool held = (tiling.held[(row - 1) / kWordRows] >> ((row - 1) % kWordRows) & 1) != 0;
    return held || tiling.full == FullTiles::from_end ? row : ~row;
  };
  for (int w = own.first; w < own.last; ++w) {
    tiling.tiles_before[w] = tile;
    for (RowBits left = tiling.tiles[w]; left != 0; left &= left - 1, ++tile) {
      const int row = w * kWordRows + lowest_bit(left);
      tiling.ranges[tile].x = row;
      if (tile > 0) tiling.ranges[tile - 1].y = end_at(row);
      if (tiling.kind != Items::none) tiling.costs[tile] = 0;
    }
  }
  if (threadIdx.x != 0) return;
  if (all > 0) tiling.ranges[all - 1].y = end_at(side.rows);
  tiling.state->count = all;
}

}  // namespace weft::cuda::sm90
