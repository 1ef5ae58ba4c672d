// The forward: a block owns a tile of query rows of one head and iterates over the keys of all its slices. Scores, the
// online softmax and P stay in registers.
//
// A row's bits do not depend on its tile: key tiles are counted from the slice's k_first, and a tile of which a row
// sees nothing leaves its state unchanged (2^0 is 1, the products are zeros).
#pragma once

#include "cuda/launch.h"
#include "kernel/cuda/portable/forward_rows.cuh"

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
      if (params.sign != 1.0f) apply_sign<N, kThreads>(q, kQBytes, params.sign);
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
        if (params.scores.softcap_scale != 0) apply_softcap(scores, params.scores.softcap_scale);
        if (visibility == Visibility::partial) apply_mask(scores, keys.slice(), row_of(0, 0), keys.base());
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
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = row_of(m, i);
        if (!resumes(params, tile, r, head)) continue;
        const RowState<float> state = state_of(params, r, head);
        row_max[m][i] = state.max * kLog2E;
        row_sum[m][i] = threadIdx.x % 4 == 0 ? state.sum : 0.0f;
        resume_sums(params.partial.sums, r, head, 0, i, sums[m]);
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
        const float most = max_nan(row_max[m][i], row_maximum(scores[m], i) * scale_log2);
        const float reference = reference_of(most);
        rescale[m][i] = exp2_fast(row_max[m][i] - reference);
        same = same && row_max[m][i] == most;
        row_max[m][i] = most;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& score = scores[m][n][2 * i + j];
            score = probability_against(reference, score, scale_log2);
            sum += score;
          }
        row_sum[m][i] = row_sum[m][i] * rescale[m][i] + sum;
      }
    if (!__all_sync(0xffffffffu, same)) rescale_rows(sums, rescale);  // else all factors are 1
  }

  __device__ void end() {
    float most = kMinusInfinity<float>;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = row_total(row_sum[m][i]);
        const int r = row_of(m, i);
        if (r >= params.q.view.rows) continue;
        RowState<float> state;
        if (row_max[m][i] != kMinusInfinity<float>) state = {row_max[m][i] * kLn2, sum};
        most = max_nan(most, state.max);
        end_row(params, tile, r, head, state, threadIdx.x % 4 == 0, 0, i, sums[m]);
      }
    raise_max_logit(params, head, most);
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
