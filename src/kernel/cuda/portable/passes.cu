// Memory-bound passes over rows before and after the kernels with matrix products.
#include "cuda/launch.h"
#include "kernel/cuda/portable/probabilities.cuh"
#include "kernel/cuda/rows.cuh"

namespace weft::cuda {
namespace {

constexpr int kThreads = 256;

unsigned blocks_for(Index items) { return static_cast<unsigned>((items + kThreads - 1) / kThreads); }

// Sum over `group` neighbouring lanes, a power of two.
__device__ float group_sum(float x, int group) {
  for (int lane = group / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
  return x;
}

// One block per tile and head; a row is read by as many lanes as it has pieces of 8 elements, or by a warp.
__global__ void __launch_bounds__(kThreads) statistics_kernel(const __grid_constant__ StatisticsParams params) {
  __shared__ double sink_terms[kThreads];
  const int tile = static_cast<int>(blockIdx.x) / params.heads_q, head = static_cast<int>(blockIdx.x) % params.heads_q;
  const int dim = static_cast<int>(params.dout.view.dim), pieces = (dim + 7) / 8;
  int group = 1;
  while (group < pieces && group < 32) group *= 2;
  const float sink = sink_logit(params.sink, head);
  double sink_term = 0;
  for (int first = 0; first < params.rows; first += kThreads / group) {
    const int r = first + static_cast<int>(threadIdx.x) / group, piece = static_cast<int>(threadIdx.x) % group;
    const int row = tile * params.rows + r;
    const bool mine = r < params.rows && row < params.padded_rows;
    const bool live = mine && row < params.dout.view.rows && row_is_live(params.list, tile, row);
    float delta = 0;
    for (int p = live ? piece : pieces; p < pieces; p += group) {
      float a[8], b[8];
      load_eight(params.out, offset_of(params.out.view, row, head) + p * 8, dim - p * 8, a);
      load_eight(params.dout, offset_of(params.dout.view, row, head) + p * 8, dim - p * 8, b);
#pragma unroll
      for (int i = 0; i < 8; ++i) delta += a[i] * b[i];
    }
    delta = group_sum(delta, group);
    if (!mine || piece != 0) continue;
    float lse = kMinusInfinity<float>;
    if (live) lse = load_element(params.lse.data, params.lse.dtype, offset_of(params.lse, row, head));
    if (live && sink != kMinusInfinity<float>) sink_term -= static_cast<double>(expf(sink - lse) * delta);
    const bool keys = lse != kMinusInfinity<float>;  // without keys P is 0, whatever the score
    params.statistics[static_cast<Index>(head) * params.padded_rows + row] =
        make_float2(keys ? lse * kLog2E : -kMinusInfinity<float>, keys ? delta : 0.0f);
  }
  if (params.dsink == nullptr) return;
  sink_terms[threadIdx.x] = sink_term;
  for (int half = kThreads / 2; half > 0; half /= 2) {  // in the same order on every run
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) sink_terms[threadIdx.x] += sink_terms[threadIdx.x + half];
  }
  if (threadIdx.x == 0) params.dsink[static_cast<Index>(head) * params.tiles + tile] = sink_terms[0];
}

__global__ void __launch_bounds__(kThreads) dsink_kernel(const double* from, int tiles, TensorView to) {
  __shared__ double sums[kThreads];
  const int head = static_cast<int>(blockIdx.x);
  double sum = 0;
  for (int t = static_cast<int>(threadIdx.x); t < tiles; t += kThreads)
    sum += from[static_cast<Index>(head) * tiles + t];
  sums[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x != 0) return;
  const Index at = head * to.head_stride;
  if (to.dtype == DType::f64)
    static_cast<double*>(to.data)[at] = sums[0];
  else
    static_cast<float*>(to.data)[at] = static_cast<float>(sums[0]);
}

// One thread per four sums, in the layout of BackwardTile::add_dq.
struct DqParams {
  const float* sums;
  const float2* statistics;
  TensorView dq;
  int rows, columns, own_rows, own, padded_rows;  // of a tile, then of a warp
  Index fours;                                    // of all heads
};
__global__ void __launch_bounds__(kThreads) dq_store_kernel(const __grid_constant__ DqParams params) {
  const Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= params.fours) return;
  const int in_tile = params.rows * params.columns / 4, lane = static_cast<int>(i % 32);
  const Index tile = i / in_tile;
  const int tiles = params.padded_rows / params.rows, head = static_cast<int>(tile / tiles);
  int block = static_cast<int>(i % in_tile) / 32;  // of 16 rows and 8 columns
  const int n = block % (params.own / 8);
  block /= params.own / 8;
  const int m = block % (params.own_rows / 16), warp = block / (params.own_rows / 16),
            column_warps = params.columns / params.own;
  const int column = warp % column_warps * params.own + n * 8 + lane % 4 * 2;
  const int row =
      static_cast<int>(tile % tiles) * params.rows + warp / column_warps * params.own_rows + m * 16 + lane / 4;
  const float4 sum = reinterpret_cast<const float4*>(params.sums)[i];
  for (int half = 0; half < 2; ++half) {
    const int r = row + 8 * half;
    if (r >= params.dq.rows) continue;
    const bool seeing = !isinf(params.statistics[static_cast<Index>(head) * params.padded_rows + r].x);
    const float x = half == 0 ? sum.x : sum.z, y = half == 0 ? sum.y : sum.w;
    RowOut(params.dq, r, head).store(column, seeing ? x : 0.0f, seeing ? y : 0.0f);
  }
}

__global__ void max_logit_kernel(const unsigned* from, TensorView to) {
  const int head = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (head >= to.heads) return;
  const unsigned bits = from[head];  // 0: no row has a key
  const float x = bits == 0 ? kMinusInfinity<float>
                            : __uint_as_float(bits == 0xffffffffu  ? 0x7fffffffu
                                              : bits & 0x80000000u ? bits ^ 0x80000000u
                                                                   : ~bits);
  store_element(to.data, to.dtype, head * to.head_stride, x);
}

// One warp per row and head.
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ FinishParams params) {
  const TensorView& sums = params.partial.sums;
  const Index item = (static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  if (item >= sums.rows * sums.heads) return;
  const int row = static_cast<int>(item / sums.heads), head = static_cast<int>(item % sums.heads);
  const RowState<float> state = params.partial.states[item];
  const FinishedRow<float> done = finish(state, sink_logit(params.sink, head));
  const float* from = static_cast<const float*>(sums.data) + offset_of(sums, row, head);
  const bool fours = reinterpret_cast<std::uintptr_t>(from) % 16 == 0 && sums.dim % 4 == 0;
  const RowOut to(params.out, row, head);
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int i = 4 * lane; i < sums.dim; i += 128) {
    float x[4] = {0, 0, 0, 0};
    if (!is_empty(state)) {
      if (fours)
        *reinterpret_cast<float4*>(x) = *reinterpret_cast<const float4*>(from + i);
      else
        for (int j = 0; j < 4 && i + j < sums.dim; ++j) x[j] = from[i + j];
    }
    to.store(i, x[0] * done.weight, x[1] * done.weight);
    to.store(i + 2, x[2] * done.weight, x[3] * done.weight);
  }
  if (lane != 0) return;
  if (params.lse.given()) store_element(params.lse.data, params.lse.dtype, offset_of(params.lse, row, head), done.lse);
  if (params.max_logit != nullptr && !is_empty(state)) atomicMax(params.max_logit + head, ordered(state.max));
}

}  // namespace

void row_statistics(const StatisticsParams& params, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(params.tiles) * static_cast<unsigned>(params.heads_q);
  launch(&statistics_kernel, {dim3(blocks), dim3(kThreads), 0}, stream, params);
}

void sum_dsink(const double* sink_terms, int tiles, const TensorView& dsink, cudaStream_t stream) {
  launch(&dsink_kernel, {dim3(static_cast<unsigned>(dsink.heads)), dim3(kThreads), 0}, stream, sink_terms, tiles,
         dsink);
}

void store_dq(const BackwardParams& params, bool f32, Width width, cudaStream_t stream) {
  const int columns = columns_k(width), warps = backward_shape(f32, width, params.large_shared).warps;
  const Index fours = static_cast<Index>(params.heads_q) * params.padded_rows * columns / 4;
  launch(
      &dq_store_kernel, {dim3(blocks_for(fours)), dim3(kThreads), 0}, stream,
      DqParams{params.dq_sums, params.statistics, params.dq, backward_rows(f32, width), columns,
               dq_rows_of_warp(warps, backward_rows(f32, width)), dq_columns(warps, width), params.padded_rows, fours});
}

void store_max_logit(const unsigned* from, const TensorView& to, cudaStream_t stream) {
  launch(&max_logit_kernel, {dim3(blocks_for(to.heads)), dim3(kThreads), 0}, stream, from, to);
}

void finish_rows(const FinishParams& params, cudaStream_t stream) {
  const TensorView& sums = params.partial.sums;
  launch(&finish_kernel, {dim3(blocks_for(sums.rows * sums.heads * 32)), dim3(kThreads), 0}, stream, params);
}

}  // namespace weft::cuda
