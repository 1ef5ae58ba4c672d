// dQ by the owner of its query rows: S and dP are recomputed, and no two blocks add to the same row, so the bits are
// the same on every run. Iterates over keys as the forward does.
#pragma once

#include "cuda/launch.h"
#include "kernel/cuda/portable/probabilities.cuh"

namespace weft::cuda {

template <class N, Width kWidth>
struct DqTile {
  static constexpr TileShape kShape = dq_shape(N::kF32, kWidth);
  static constexpr int kDimQk = columns_k(kWidth), kDimV = columns_v(kWidth), kKeys = kShape.keys;
  static constexpr int kRows = dq_rows(N::kF32, kWidth), kThreads = kShape.threads();
  static constexpr unsigned kElementBytes = 2 * N::kParts;

  const BackwardParams& params;
  int tile, head;

  __device__ void run(unsigned shared) const {
    const unsigned q = shared, dout = q + kElementBytes * kRows * kDimQk, k = dout + kElementBytes * kRows * kDimV,
                   v = k + kElementBytes * kKeys * kDimQk;
    const int row = tile * kRows, warp_row = row + static_cast<int>(threadIdx.x / 32) * 16;
    const int lane_row = warp_row + static_cast<int>(threadIdx.x % 32) / 4, kv_head = params.heads.kv_head[head];
    float sums[1][kDimQk / 8][4];
    clear(sums);
    KeyTileIterator<kKeys, kRows> keys(params.rows, tile);
    bool more = keys.start();
    float2 statistics[2];
    if (more) {
      const int rows = static_cast<int>(params.q.view.rows);
      const auto valid = [&](int r) { return row + r < rows; };
      load_tile<N, kRows, kDimQk, kThreads>(q, params.q, row, head, valid);
      load_tile<N, kRows, kDimV, kThreads>(dout, params.dout, row, head, valid);
      const float2* from = params.statistics + static_cast<Index>(head) * params.padded_rows + lane_row;
      statistics[0] = from[0];
      statistics[1] = from[8];
    }
    using KBlocks = Blocks<kKeys, kDimQk>;
    using VBlocks = Blocks<kKeys, kDimV>;
    for (; more; more = keys.next()) {
      const auto valid = keys.valid();
      load_tile<N, kKeys, kDimQk, kThreads>(k, params.k, keys.base(), kv_head, valid);
      load_tile<N, kKeys, kDimV, kThreads>(v, params.v, keys.base(), kv_head, valid);
      cp_async_wait_all();
      __syncthreads();
      const WorkSlice slice = keys.slice();
      if (visibility_of(slice, warp_row, warp_row + 15, keys.base(), keys.base() + kKeys - 1) != Visibility::none) {
        float p[1][kKeys / 8][4], d[1][kKeys / 8][4];
        clear(p);
        clear(d);
        mma_tiles<N, kDimQk / 16>(p, LeftRows<Blocks<kRows, kDimQk>>{Blocks<kRows, kDimQk>(q, warp_row - row)},
                                  RightRows<KBlocks>{KBlocks(k, 0)});
        mma_tiles<N, kDimV / 16>(d, LeftRows<Blocks<kRows, kDimV>>{Blocks<kRows, kDimV>(dout, warp_row - row)},
                                 RightRows<VBlocks>{VBlocks(v, 0)});
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const VisibleRange seen = visible_keys(slice, lane_row + 8 * i, keys.base());
          const int column = 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const int c = n * 8 + column + j;
              float slope = params.scale;
              if (params.scores.softcap_scale != 0)
                p[0][n][2 * i + j] = softcapped(params.scores.softcap_scale, p[0][n][2 * i + j], slope);
              const bool sees = c >= seen.first && c <= seen.last;
              const float probability =
                  sees ? probability_of(params.scores, p[0][n][2 * i + j], statistics[i].x) : 0.0f;
              d[0][n][2 * i + j] = probability * slope * (d[0][n][2 * i + j] - statistics[i].y);
            }
        }
        mma_fragments<N>(sums, d, RightColumns<KBlocks>{KBlocks(k, 0)});
      }
      __syncthreads();
    }
    cp_async_wait_all();
    store_gradient(params.dq, lane_row, head, 2 * static_cast<int>(threadIdx.x % 4), false, sums,
                   [&](int r) { return row_is_live(params.rows, tile, r); });
  }
};

template <class N, Width kWidth>
__global__ void __launch_bounds__(dq_shape(N::kF32, kWidth).threads(), dq_blocks(N::kF32, kWidth))
    dq_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int item = static_cast<int>(blockIdx.x) / params.heads_q, head = static_cast<int>(blockIdx.x) % params.heads_q;
  if (item >= *params.rows.tiles) return;
  DqTile<N, kWidth>{params, params.rows.order[item], head}.run(shared_address(shared));
}

template <class N, Width kWidth>
void launch_dq(const BackwardParams& params, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(params.row_tiles) * static_cast<unsigned>(params.heads_q));
  launch(&dq_kernel<N, kWidth>,
         {blocks, dim3(static_cast<unsigned>(dq_shape(N::kF32, kWidth).threads())),
          static_cast<std::size_t>(dq_shared(N::kF32, kWidth))},
         stream, params);
}

}  // namespace weft::cuda
