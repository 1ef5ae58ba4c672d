// The forward: a block owns a tile of query rows of one head and iterates over the keys of all its slices. Scores, the
// online softmax and P stay in registers.
//
// A row's bits do not depend on its tile: key tiles are counted from the slice's k_first, and a tile of which a row
// sees nothing leaves its state unchanged (2^0 is 1, the products are zeros).
#pragma once

#include "cuda/launch.h"
#include "kernel/cuda/portable/params.h"
#include "kernel/cuda/portable/tile.cuh"
#include "kernel/cuda/rows.cuh"
#include "kernel/cuda/work/tile_iterators.cuh"

namespace weft::cuda {

template <class N, Width kWidth>
struct ForwardTile {
  static constexpr TileShape kShape = forward_shape(N::kF32, kWidth);
  static constexpr int kDimQk = columns_k(kWidth), kDimV = columns_v(kWidth), kKeys = kShape.keys,
                       kM = kShape.row_blocks;
  static constexpr int kRows = forward_rows(N::kF32, kWidth), kThreads = kShape.threads();
  static constexpr unsigned kQBytes = 2 * N::kParts * kRows * kDimQk, kKBytes = 2 * N::kParts * kKeys * kDimQk;

  using QBlocks = Blocks<kRows, kDimQk>;
  using KBlocks = Blocks<kKeys, kDimQk>;
  using VBlocks = Blocks<kKeys, kDimV>;

  const ForwardParams& params;
  unsigned q;  // address of the shared memory: Q, then a tile of K and one of V
  int tile, head;
  float sums[kM][kDimV / 8][4];
  float row_max[kM][2], row_sum[kM][2];  // maximum logit·log2(e); this lane's part of the sum of P

  __device__ ForwardTile(const ForwardParams& c, unsigned shared, int tile_, int head_)
      : params(c), q(shared), tile(tile_), head(head_) {}

  __device__ unsigned k() const { return q + kQBytes; }
  __device__ unsigned v() const { return q + kQBytes + kKBytes; }
  __device__ int kv_head() const { return params.heads.kv_head[head]; }
  // First row of the tile, of the warp in it, and of the lane.
  __device__ int row() const { return tile * kRows; }
  __device__ static int warp_row() { return static_cast<int>(threadIdx.x / 32) * 16 * kM; }
  __device__ int row_of(int m, int i) const {
    return row() + warp_row() + static_cast<int>(threadIdx.x % 32) / 4 + 16 * m + 8 * i;
  }

  __device__ void run() {
    KeyTileIterator<kKeys, kRows> keys(params.list, tile);
    begin();
    bool more = keys.start();
    if (more) {
      const int rows = static_cast<int>(params.q.view.rows) - row();
      load_tile<N, kRows, kDimQk, kThreads>(q, params.q, row(), head, [=](int r) { return r < rows; });
      load_tile<N, kKeys, kDimQk, kThreads>(k(), params.k, keys.base(), kv_head(), keys.valid());
      if (params.sign != 1.0f) apply_sign();
    }
    while (more) {
      cp_async_wait_all();
      __syncthreads();
      load_tile<N, kKeys, kDimV, kThreads>(v(), params.v, keys.base(), kv_head(), keys.valid());
      const int first = row() + warp_row();
      const Visibility visibility =
          visibility_of(keys.slice(), first, first + 16 * kM - 1, keys.base(), keys.base() + kKeys - 1);
      float scores[kM][kKeys / 8][4];
      if (visibility != Visibility::none) {
        clear(scores);
        mma_tiles<N, kDimQk / 16>(scores, LeftRows<QBlocks>{QBlocks(q, warp_row())},
                                  RightRows<KBlocks>{KBlocks(k(), 0)});
        if (params.scores.softcap_scale != 0) apply_softcap(scores);
        if (visibility == Visibility::partial) apply_mask(scores, keys.slice(), keys.base());
      }
      cp_async_wait_all();
      __syncthreads();
      more = keys.next();
      if (more) load_tile<N, kKeys, kDimQk, kThreads>(k(), params.k, keys.base(), kv_head(), keys.valid());
      if (visibility != Visibility::none) {
        softmax(scores);
        mma_fragments<N>(sums, scores, RightColumns<VBlocks>{VBlocks(v(), 0)});
      }
    }
    end();
  }

  __device__ bool resumes(int r) const {
    return params.partial.states != nullptr && r < params.q.view.rows && row_is_live(params.list, tile, r);
  }
  __device__ RowState<float>& state_of(int r) const {
    return params.partial.states[static_cast<Index>(r) * params.heads_q + head];
  }

  // Starts rows as empty, or where an earlier call left them.
  __device__ void begin() {
    clear(sums);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        row_max[m][i] = kMinusInfinity<float>;
        row_sum[m][i] = 0;
      }
    if (params.partial.states == nullptr) return;
    const TensorView& old = params.partial.sums;
    const int column = 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = row_of(m, i);
        if (!resumes(r) || is_empty(state_of(r))) continue;
        row_max[m][i] = state_of(r).max * kLog2E;
        row_sum[m][i] = threadIdx.x % 4 == 0 ? state_of(r).sum : 0.0f;
        const float* from = static_cast<const float*>(old.data) + offset_of(old, r, head);
#pragma unroll
        for (int n = 0; n < kDimV / 8; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j)
            if (n * 8 + column + j < old.dim) sums[m][n][2 * i + j] = from[n * 8 + column + j];
      }
  }

  // For a scale that is not positive the queries change sign, or become zeros (NaN stays NaN).
  __device__ void apply_sign() {
    cp_async_wait_all();
    __syncthreads();
    for (unsigned i = threadIdx.x; i < kQBytes / 2; i += kThreads) {
      std::uint16_t bits;
      asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(bits) : "r"(q + 2 * i));
      bits = N::times(bits, params.sign);
      asm volatile("st.shared.u16 [%0], %1;\n" ::"r"(q + 2 * i), "h"(bits) : "memory");
    }
  }

  __device__ void apply_softcap(float (&scores)[kM][kKeys / 8][4]) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][n][i] = tanhf(scores[m][n][i] * params.scores.softcap_scale);
  }

  __device__ void apply_mask(float (&scores)[kM][kKeys / 8][4], const WorkSlice& slice, int base) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const VisibleRange seen = visible_keys(slice, row_of(m, i), base);
        const int column = 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int key = n * 8 + column + j;
            if (key < seen.first || key > seen.last) scores[m][n][2 * i + j] = kMinusInfinity<float>;
          }
      }
  }

  // Scores become P against the new maximum; earlier sums are rescaled to it.
  __device__ void softmax(float (&scores)[kM][kKeys / 8][4]) {
    const float scale_log2 = params.scores.scale_log2;
    float rescale[kM][2];
    bool same = true;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float most = max_nan(scores[m][0][2 * i], scores[m][0][2 * i + 1]);
#pragma unroll
        for (int n = 1; n < kKeys / 8; ++n) most = max_nan(most, max_nan(scores[m][n][2 * i], scores[m][n][2 * i + 1]));
        most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, 2));
        most = max_nan(row_max[m][i], most * scale_log2);
        // A row without keys so far: any finite reference will do, while -inf - -inf is NaN.
        const float reference = most == kMinusInfinity<float> ? 0.0f : most;
        rescale[m][i] = exp2_fast(row_max[m][i] - reference);
        same = same && row_max[m][i] == most;
        row_max[m][i] = most;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            // Not fused: the exponent is exactly 0 at the maximum, so that P is exactly 1 there.
            const float probability = exp2_fast(__fsub_rn(__fmul_rn(scores[m][n][2 * i + j], scale_log2), reference));
            scores[m][n][2 * i + j] = probability;
            sum += probability;
          }
        row_sum[m][i] = row_sum[m][i] * rescale[m][i] + sum;
      }
    if (__all_sync(0xffffffffu, same)) return;  // all factors are 1
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kDimV / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] *= rescale[m][i / 2];
  }

  __device__ void end() {
    const int column = 2 * static_cast<int>(threadIdx.x % 4);
    float most = kMinusInfinity<float>;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = row_sum[m][i];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const int r = row_of(m, i);
        if (r >= params.q.view.rows) continue;
        RowState<float> state;
        if (row_max[m][i] != kMinusInfinity<float>) state = {row_max[m][i] * kLn2, sum};
        most = max_nan(most, state.max);
        const bool partial = params.partial.states != nullptr;
        if (partial && !row_is_live(params.list, tile, r)) continue;
        float weight = 1;
        if (partial) {
          if (threadIdx.x % 4 == 0) state_of(r) = state;
        } else {
          const FinishedRow<float> done = finish(state, sink_logit(params.sink, head));
          weight = done.weight;
          if (threadIdx.x % 4 == 0 && params.lse.given())
            store_element(params.lse.data, params.lse.dtype, offset_of(params.lse, r, head), done.lse);
        }
        const bool empty = is_empty(state);
        const RowOut out(partial ? params.partial.sums : params.out, r, head);
#pragma unroll
        for (int n = 0; n < kDimV / 8; ++n) {
          // Adding 0 turns -0 into 0.
          const float x = empty ? 0.0f : sums[m][n][2 * i] * weight + 0.0f;
          const float y = empty ? 0.0f : sums[m][n][2 * i + 1] * weight + 0.0f;
          out.store(n * 8 + column, x, y);
        }
      }
    if (params.max_logit == nullptr) return;
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, lane));
    if (threadIdx.x % 32 == 0 && most != kMinusInfinity<float>) atomicMax(params.max_logit + head, ordered(most));
  }
};

template <class N, Width kWidth>
__global__ void __launch_bounds__(forward_shape(N::kF32, kWidth).threads(), forward_blocks(N::kF32, kWidth))
    forward_kernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int item = static_cast<int>(blockIdx.x) / params.heads_q, head = static_cast<int>(blockIdx.x) % params.heads_q;
  if (item >= *params.list.tiles) return;
  ForwardTile<N, kWidth>(params, shared_address(shared), params.list.order[item], head).run();
}

template <class N, Width kWidth>
void launch_forward(const ForwardParams& params, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(params.tiles) * static_cast<unsigned>(params.heads_q));
  launch(&forward_kernel<N, kWidth>,
         {blocks, dim3(static_cast<unsigned>(forward_shape(N::kF32, kWidth).threads())),
          static_cast<std::size_t>(forward_shared(N::kF32, kWidth))},
         stream, params);
}

template <class N>
void run_forward(Width width, const ForwardParams& params, cudaStream_t stream) {
  if constexpr (N::kF32) {
    if (width == Width::w128) return launch_forward<N, Width::w128>(params, stream);
    launch_forward<N, Width::w256>(params, stream);
  } else {
    dispatch_width(width, [&]<Width kWidth>() { launch_forward<N, kWidth>(params, stream); });
  }
}

}  // namespace weft::cuda
