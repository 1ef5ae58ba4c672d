// dQ by the owner of its query rows: S and dP computed once more, and nothing added by several blocks, so that its bits
// are the same on every run. The walk is the forward's.
#pragma once

#include "cuda/launch.h"
#include "kernel/cuda/portable/scores.cuh"

namespace weft::cuda {

template <class N, Width kWidth>
struct DqTile {
  static constexpr TileShape kShape = dq_shape(N::kF32, kWidth);
  static constexpr int kK = columns_k(kWidth), kV = columns_v(kWidth), kKeys = kShape.keys;
  static constexpr int kRows = dq_rows(N::kF32, kWidth), kThreads = kShape.threads();
  static constexpr unsigned kNumber = 2 * N::kParts;

  const BackwardCall& call;
  int tile, head;

  __device__ void run(unsigned shared) const {
    const unsigned q = shared, dout = q + kNumber * kRows * kK, k = dout + kNumber * kRows * kV,
                   v = k + kNumber * kKeys * kK;
    const int row = tile * kRows, warp_row = row + static_cast<int>(threadIdx.x / 32) * 16;
    const int lane_row = warp_row + static_cast<int>(threadIdx.x % 32) / 4, kv_head = call.heads.kv_head[head];
    float sums[1][kK / 8][4];
    clear(sums);
    KeyTiles<kKeys, kRows> keys(call.rows, tile);
    bool more = keys.start();
    float2 statistics[2];
    if (more) {
      const int rows = static_cast<int>(call.q.view.rows);
      const auto valid = [&](int r) { return row + r < rows; };
      load_tile<N, kRows, kK, kThreads>(q, call.q, row, head, valid);
      load_tile<N, kRows, kV, kThreads>(dout, call.dout, row, head, valid);
      const float2* from = call.statistics + static_cast<Index>(head) * call.padded_rows + lane_row;
      statistics[0] = from[0];
      statistics[1] = from[8];
    }
    using KBlocks = Blocks<kKeys, kK>;
    using VBlocks = Blocks<kKeys, kV>;
    for (; more; more = keys.next()) {
      const auto valid = keys.valid();
      load_tile<N, kKeys, kK, kThreads>(k, call.k, keys.base(), kv_head, valid);
      load_tile<N, kKeys, kV, kThreads>(v, call.v, keys.base(), kv_head, valid);
      copies_done();
      __syncthreads();
      const WorkSlice slice = keys.slice();
      if (sight_of(slice, warp_row, warp_row + 15, keys.base(), keys.base() + kKeys - 1) != Sight::none) {
        float p[1][kKeys / 8][4], d[1][kKeys / 8][4];
        clear(p);
        clear(d);
        multiply<N, kK / 16>(p, LeftRows<Blocks<kRows, kK>>{Blocks<kRows, kK>(q, warp_row - row)},
                             RightRows<KBlocks>{KBlocks(k, 0)});
        multiply<N, kV / 16>(d, LeftRows<Blocks<kRows, kV>>{Blocks<kRows, kV>(dout, warp_row - row)},
                             RightRows<VBlocks>{VBlocks(v, 0)});
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const Seen seen = keys_seen(slice, lane_row + 8 * i, keys.base());
          const int column = 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const int c = n * 8 + column + j;
              float slope = call.scale;
              if (call.scores.bend != 0) p[0][n][2 * i + j] = bent(call.scores.bend, p[0][n][2 * i + j], slope);
              const bool sees = c >= seen.first && c <= seen.last;
              const float share = sees ? share_of(call.scores, p[0][n][2 * i + j], statistics[i].x) : 0.0f;
              d[0][n][2 * i + j] = share * slope * (d[0][n][2 * i + j] - statistics[i].y);
            }
        }
        multiply_sums<N>(sums, d, RightColumns<KBlocks>{KBlocks(k, 0)});
      }
      __syncthreads();
    }
    copies_done();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = lane_row + 8 * i;
      if (r >= call.q.view.rows) continue;
      const bool live = row_is_live(call.rows, tile, r);
      const RowOut out(call.dq, r, head);
#pragma unroll
      for (int n = 0; n < kK / 8; ++n)
        out.store(n * 8 + 2 * static_cast<int>(threadIdx.x % 4), live ? sums[0][n][2 * i] : 0.0f,
                  live ? sums[0][n][2 * i + 1] : 0.0f);
    }
  }
};

template <class N, Width kWidth>
__global__ void __launch_bounds__(dq_shape(N::kF32, kWidth).threads(), dq_blocks(N::kF32, kWidth))
    dq_kernel(const __grid_constant__ BackwardCall call) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int item = static_cast<int>(blockIdx.x) / call.heads_q, head = static_cast<int>(blockIdx.x) % call.heads_q;
  if (item >= *call.rows.tiles) return;
  DqTile<N, kWidth>{call, call.rows.order[item], head}.run(shared_address(shared));
}

template <class N, Width kWidth>
void launch_dq(const BackwardCall& call, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(call.row_tiles) * static_cast<unsigned>(call.heads_q));
  launch(&dq_kernel<N, kWidth>,
         {blocks, dim3(static_cast<unsigned>(dq_shape(N::kF32, kWidth).threads())),
          static_cast<std::size_t>(dq_shared(N::kF32, kWidth))},
         stream, call);
}

}  // namespace weft::cuda
