// Passes over rows before and after the products: memory alone.
#include "cuda/launch.h"
#include "kernel/cuda/portable/scores.cuh"
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

// A block a tile and head; a row is read by as many lanes as it has pieces of 8.
__global__ void __launch_bounds__(kThreads) statistics_kernel(const __grid_constant__ StatisticsCall call) {
  __shared__ double shares[kThreads];
  const int tile = static_cast<int>(blockIdx.x) / call.heads_q, head = static_cast<int>(blockIdx.x) % call.heads_q;
  const int dim = static_cast<int>(call.dout.view.dim), pieces = (dim + 7) / 8;
  int group = 1;
  while (group < pieces) group *= 2;
  const float sink = sink_logit(call.sink, head);
  double share = 0;
  for (int first = 0; first < call.rows; first += kThreads / group) {
    const int r = first + static_cast<int>(threadIdx.x) / group, piece = static_cast<int>(threadIdx.x) % group;
    const int row = tile * call.rows + r;
    const bool mine = r < call.rows && row < call.padded_rows;
    const bool live = mine && row < call.dout.view.rows && row_is_live(call.list, tile, row);
    float delta = 0;
    if (live && piece < pieces) {
      float a[8], b[8];
      load_eight(call.out, offset_of(call.out.view, row, head) + piece * 8, dim - piece * 8, a);
      load_eight(call.dout, offset_of(call.dout.view, row, head) + piece * 8, dim - piece * 8, b);
#pragma unroll
      for (int i = 0; i < 8; ++i) delta += a[i] * b[i];
    }
    delta = group_sum(delta, group);
    if (!mine || piece != 0) continue;
    float lse = kMinusInfinity<float>;
    if (live) lse = load_element(call.lse.data, call.lse.dtype, offset_of(call.lse, row, head));
    if (live && sink != kMinusInfinity<float>) share -= static_cast<double>(expf(sink - lse) * delta);
    const bool keys = lse != kMinusInfinity<float>;  // without keys P is 0, whatever the score
    call.statistics[static_cast<Index>(head) * call.padded_rows + row] =
        make_float2(keys ? lse * kLog2E : -kMinusInfinity<float>, keys ? delta : 0.0f);
  }
  if (call.dsink == nullptr) return;
  shares[threadIdx.x] = share;
  for (int half = kThreads / 2; half > 0; half /= 2) {  // in the same order on every run
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) shares[threadIdx.x] += shares[threadIdx.x + half];
  }
  if (threadIdx.x == 0) call.dsink[static_cast<Index>(head) * call.tiles + tile] = shares[0];
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

// A thread four sums, in the order of BackwardTile::add_dq.
struct DqCall {
  const float* sums;
  const float2* statistics;
  TensorView dq;
  int rows, columns, own_rows, own, padded_rows;  // of a tile, of a warp
  Index fours;                                    // of all heads
};
__global__ void __launch_bounds__(kThreads) dq_store_kernel(const __grid_constant__ DqCall call) {
  const Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= call.fours) return;
  const int in_tile = call.rows * call.columns / 4, lane = static_cast<int>(i % 32);
  const Index tile = i / in_tile;
  const int tiles = call.padded_rows / call.rows, head = static_cast<int>(tile / tiles);
  int block = static_cast<int>(i % in_tile) / 32;  // of 16 rows and 8 columns
  const int n = block % (call.own / 8);
  block /= call.own / 8;
  const int m = block % (call.own_rows / 16), warp = block / (call.own_rows / 16), beside = call.columns / call.own;
  const int column = warp % beside * call.own + n * 8 + lane % 4 * 2;
  const int row = static_cast<int>(tile % tiles) * call.rows + warp / beside * call.own_rows + m * 16 + lane / 4;
  const float4 sum = reinterpret_cast<const float4*>(call.sums)[i];
  for (int half = 0; half < 2; ++half) {
    const int r = row + 8 * half;
    if (r >= call.dq.rows) continue;
    const bool seeing = !isinf(call.statistics[static_cast<Index>(head) * call.padded_rows + r].x);
    const float x = half == 0 ? sum.x : sum.z, y = half == 0 ? sum.y : sum.w;
    RowOut(call.dq, r, head).store(column, seeing ? x : 0.0f, seeing ? y : 0.0f);
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

// A warp a row and head.
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ FinishCall call) {
  const TensorView& sums = call.partial.sums;
  const Index item = (static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  if (item >= sums.rows * sums.heads) return;
  const int row = static_cast<int>(item / sums.heads), head = static_cast<int>(item % sums.heads);
  const RowState<float> state = call.partial.states[item];
  const FinishedRow<float> done = finish(state, sink_logit(call.sink, head));
  const float* from = static_cast<const float*>(sums.data) + offset_of(sums, row, head);
  const bool fours = reinterpret_cast<std::uintptr_t>(from) % 16 == 0 && sums.dim % 4 == 0;
  const RowOut to(call.out, row, head);
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
  if (call.lse.given()) store_element(call.lse.data, call.lse.dtype, offset_of(call.lse, row, head), done.lse);
  if (call.max_logit != nullptr && !is_empty(state)) atomicMax(call.max_logit + head, ordered(state.max));
}

}  // namespace

void row_statistics(const StatisticsCall& call, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(call.tiles) * static_cast<unsigned>(call.heads_q);
  launch(&statistics_kernel, {dim3(blocks), dim3(kThreads), 0}, stream, call);
}

void sum_dsink(const double* shares, int tiles, const TensorView& dsink, cudaStream_t stream) {
  launch(&dsink_kernel, {dim3(static_cast<unsigned>(dsink.heads)), dim3(kThreads), 0}, stream, shares, tiles, dsink);
}

void store_dq(const BackwardCall& call, bool f32, Width width, cudaStream_t stream) {
  const int columns = columns_k(width), warps = backward_shape(f32, width, call.roomy).warps;
  const Index fours = static_cast<Index>(call.heads_q) * call.padded_rows * columns / 4;
  launch(&dq_store_kernel, {dim3(blocks_for(fours)), dim3(kThreads), 0}, stream,
         DqCall{call.dq_sums, call.statistics, call.dq, backward_rows(f32, width), columns,
                dq_rows_of_warp(warps, backward_rows(f32, width)), dq_columns(warps, width), call.padded_rows, fours});
}

void store_max_logit(const unsigned* from, const TensorView& to, cudaStream_t stream) {
  launch(&max_logit_kernel, {dim3(blocks_for(to.heads)), dim3(kThreads), 0}, stream, from, to);
}

void finish_rows(const FinishCall& call, cudaStream_t stream) {
  const TensorView& sums = call.partial.sums;
  launch(&finish_kernel, {dim3(blocks_for(sums.rows * sums.heads * 32)), dim3(kThreads), 0}, stream, call);
}

}  // namespace weft::cuda
