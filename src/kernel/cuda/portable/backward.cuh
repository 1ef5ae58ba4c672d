// The backward: a block owns a tile of keys of one K/V head and iterates over the query rows that see them, slice by
// slice and head by head of the group. A warp has 16 keys: S^T and dP^T are its accumulators, so P^T and dS^T are
// already A operands of dV and dK, which stay in registers until the end: rounded once, with the same bits on every
// run. Only dS goes through shared memory, for dQ = dS·K, which is added to f32 sums in global memory.
#pragma once

#include "cuda/launch.h"
#include "kernel/cuda/portable/probabilities.cuh"

namespace weft::cuda {

// kDk, kDv: what this pass computes. dQ goes with dK.
template <class N, Width kWidth, bool kLargeShared, bool kDk, bool kDv>
struct BackwardTile {
  static constexpr TileShape kShape = backward_shape(N::kF32, kWidth, kLargeShared);
  static constexpr int kDimQk = columns_k(kWidth), kDimV = columns_v(kWidth), kKeys = kShape.keys,
                       kWarps = kShape.warps;
  static constexpr int kRows = backward_rows(N::kF32, kWidth), kThreads = kShape.threads();
  static constexpr int kPitch = kRows < kMinPitch ? kMinPitch : kRows;
  static constexpr unsigned kElementBytes = 2 * N::kParts;

  static constexpr int kOwn = dq_columns(kWarps, kWidth),
                       kOwnRows = dq_rows_of_warp(kWarps, kRows);  // rows and columns of dQ that a warp computes
  static constexpr int kColumnWarps = kDimQk / kOwn;
  using Iterator = QueryTileIterator<kRows, kKeys>;
  // Shared memory: K [kKeys][kDimQk], V [kKeys][kDimV], Q [kRows][kDimQk], dO [kRows][kDimV], dS [kKeys][kPitch],
  // statistics [kRows] float2, live keys [kKeys] bytes.
  static constexpr unsigned kVAt = kElementBytes * kKeys * kDimQk, kQAt = kVAt + kElementBytes * kKeys * kDimV,
                            kDoutAt = kQAt + kElementBytes * kRows * kDimQk,
                            kDsAt = kDoutAt + kElementBytes * kRows * kDimV,
                            kStatisticsAt = kDsAt + kElementBytes * kKeys * kPitch, kLiveAt = kStatisticsAt + 8 * kRows;

  const BackwardParams& params;
  unsigned k;  // address of the shared memory
  int tile, kv_head;
  float dk_sums[1][kDk ? kDimQk / 8 : 1][4], dv_sums[1][kDv ? kDimV / 8 : 1][4];

  __device__ BackwardTile(const BackwardParams& c, unsigned shared, int tile_, int kv_head_)
      : params(c), k(shared), tile(tile_), kv_head(kv_head_) {}

  __device__ int key() const { return tile * kKeys; }
  __device__ static int warp_key() {
    return static_cast<int>(threadIdx.x / 32) * 16;
  }  // the warp's first key in the tile
  __device__ bool live(int r) const { return load_byte(k + kLiveAt + static_cast<unsigned>(r)); }

  __device__ void run() {
    for (int r = static_cast<int>(threadIdx.x); r < kKeys; r += kThreads)
      store_byte(k + kLiveAt + static_cast<unsigned>(r), key_is_live(params.keys, tile, key() + r));
    __syncthreads();
    if constexpr (kDk) clear(dk_sums);
    if constexpr (kDv) clear(dv_sums);
    Iterator rows(params.keys, params.heads, tile, kv_head);
    bool more = rows.start();
    if (more) {
      const auto is_live = [&](int r) { return live(r); };
      load_tile<N, kKeys, kDimQk, kThreads>(k, params.k, key(), kv_head, is_live);
      if constexpr (kDk) load_tile<N, kKeys, kDimV, kThreads>(k + kVAt, params.v, key(), kv_head, is_live);
      load_rows(rows);
    }
    while (more) {
      cp_async_wait_all();
      __syncthreads();
      const int base = rows.base(), head = rows.head();
      attend(rows);
      __syncthreads();
      more = rows.next();
      if (more) load_rows(rows);
      if constexpr (kDk)
        if (params.dq_sums != nullptr) add_dq(head, base);
    }
    end();
  }

  __device__ void load_rows(const Iterator& rows) {
    const auto valid = rows.valid();
    const int base = rows.base(), head = rows.head();
    load_tile<N, kRows, kDimQk, kThreads>(k + kQAt, params.q, base, head, valid);
    load_tile<N, kRows, kDimV, kThreads>(k + kDoutAt, params.dout, base, head, valid);
    const float2* from = params.statistics + static_cast<Index>(head) * params.padded_rows + base;
    for (int r = static_cast<int>(threadIdx.x); r < kRows; r += kThreads)
      cp_async_8(k + kStatisticsAt + static_cast<unsigned>(8 * r), from + r);
  }

  __device__ void attend(const Iterator& rows) {
    const int base = rows.base(), first = key() + warp_key();
    const Visibility visibility = visibility_of(rows.slice(), base, base + kRows - 1, first, first + 15);
    float p[1][kRows / 8][4], d[1][kRows / 8][4];
    if (visibility == Visibility::none) {
      if constexpr (kDk) {
        clear(d);
        if (params.dq_sums != nullptr) store_ds(d);
      }
      return;
    }
    using RowBlocksK = Blocks<kRows, kDimQk>;
    using RowBlocksV = Blocks<kRows, kDimV>;
    clear(p);
    mma_tiles<N, kDimQk / 16>(p, LeftRows<Blocks<kKeys, kDimQk>>{Blocks<kKeys, kDimQk>(k, warp_key())},
                              RightRows<RowBlocksK>{RowBlocksK(k + kQAt, 0)});
    if constexpr (kDk) {
      clear(d);
      mma_tiles<N, kDimV / 16>(d, LeftRows<Blocks<kKeys, kDimV>>{Blocks<kKeys, kDimV>(k + kVAt, warp_key())},
                               RightRows<RowBlocksV>{RowBlocksV(k + kDoutAt, 0)});
    }
    if (params.scores.softcap_scale != 0)
      gradients<true, true>(p, d, rows);
    else if (visibility == Visibility::partial)
      gradients<true, false>(p, d, rows);
    else
      gradients<false, false>(p, d, rows);
    if constexpr (kDv) mma_fragments<N>(dv_sums, p, RightColumns<RowBlocksV>{RowBlocksV(k + kDoutAt, 0)});
    if constexpr (kDk) {
      if (params.dq_sums != nullptr) store_ds(d);
      mma_fragments<N>(dk_sums, d, RightColumns<RowBlocksK>{RowBlocksK(k + kQAt, 0)});
    }
  }

  // Scores become P, and dP becomes dS. Row i is one of two keys, columns are query rows. dS has the scale applied
  // before it is rounded, to use the range of f16.
  template <bool kMasked, bool kSoftcap>
  __device__ void gradients(float (&p)[1][kRows / 8][4], float (&d)[1][kRows / 8][4], const Iterator& rows) {
    VisibleRange seen[2];
    if constexpr (kMasked) {
      const WorkSlice slice = rows.slice();
      const int first = key() + warp_key() + static_cast<int>(threadIdx.x % 32) / 4;
      for (int i = 0; i < 2; ++i) seen[i] = visible_rows(slice, first + 8 * i, rows.base());
    }
    const int column = 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      float lse[2], delta[2];
      asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];\n"
                   : "=f"(lse[0]), "=f"(delta[0]), "=f"(lse[1]), "=f"(delta[1])
                   : "r"(k + kStatisticsAt + static_cast<unsigned>(8 * (n * 8 + column))));
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int r = n * 8 + column + j;
          float& score = p[0][n][2 * i + j];
          float slope = 1;
          if constexpr (kSoftcap) score = softcapped(params.scores.softcap_scale, score, slope);
          const bool sees = !kMasked || (r >= seen[i].first && r <= seen[i].last);
          score = sees ? probability_of(params.scores, score, lse[j]) : 0.0f;
          if constexpr (kDk) {
            float& ds = d[0][n][2 * i + j];
            ds = score * (ds * params.scale - params.scale * delta[j]);
            if constexpr (kSoftcap) ds *= slope;
          }
        }
    }
  }

  // dS^T to shared memory as [key][row].
  __device__ void store_ds(const float (&d)[1][kRows / 8][4]) const {
    store_packed<N, kKeys, kPitch>(k + kDsAt, warp_key(), 0, d);
  }

  // A warp computes its part of dQ from all keys of the tile. The sums in global memory are in register layout: warp by
  // warp, blocks of 16 x 8, four floats per lane.
  __device__ void add_dq(int head, int base) const {
    static_assert(kOwn % 16 == 0 && kOwnRows % 16 == 0);
    const int warp = static_cast<int>(threadIdx.x / 32);
    float sums[kOwnRows / 16][kOwn / 8][4];
    clear(sums);
    using DsBlocks = Blocks<kKeys, kPitch>;
    using KeyBlocks = Blocks<kKeys, kDimQk>;
    mma_tiles<N, kKeys / 16>(sums, LeftColumns<DsBlocks>{DsBlocks(k + kDsAt, 0), warp / kColumnWarps * (kOwnRows / 16)},
                             RightColumns<KeyBlocks>{KeyBlocks(k, 0), warp % kColumnWarps * (kOwn / 16)});
    const Index tile_of_rows = static_cast<Index>(head) * (params.padded_rows / kRows) + base / kRows;
    float* to = params.dq_sums + tile_of_rows * (kRows * kDimQk) + warp * (kOwnRows * kOwn) + threadIdx.x % 32 * 4;
#pragma unroll
    for (int m = 0; m < kOwnRows / 16; ++m)
#pragma unroll
      for (int n = 0; n < kOwn / 8; ++n) red_add_v4_f32(to + (m * (kOwn / 8) + n) * 128, sums[m][n]);
  }

  __device__ void end() const {
    const int lane = static_cast<int>(threadIdx.x % 32), row = key() + warp_key() + lane / 4, column = 2 * (lane % 4);
    const auto seen = [&](int r) {
      return live(r - key()) && params.heads.begin[kv_head] < params.heads.begin[kv_head + 1];
    };
    if constexpr (kDk) store_gradient(params.dk, row, kv_head, column, params.add_keys, dk_sums, seen);
    if constexpr (kDv) store_gradient(params.dv, row, kv_head, column, params.add_keys, dv_sums, seen);
  }
};

template <class N, Width kWidth, bool kLargeShared, bool kDk, bool kDv>
__global__ void __launch_bounds__(backward_shape(N::kF32, kWidth, kLargeShared).threads(),
                                  backward_blocks(N::kF32, kWidth))
    backward_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  // Head by head, so that the dQ that blocks add to stays in the L2 cache.
  const int item = static_cast<int>(blockIdx.x) % params.key_tiles,
            kv_head = static_cast<int>(blockIdx.x) / params.key_tiles;
  if (item >= *params.keys.tiles) return;
  BackwardTile<N, kWidth, kLargeShared, kDk, kDv>(params, shared_address(shared), params.keys.order[item], kv_head)
      .run();
}

template <class N, Width kWidth, bool kLargeShared, bool kDk, bool kDv>
void launch_backward_pass(const BackwardParams& params, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(params.key_tiles) * static_cast<unsigned>(params.heads_k));
  launch(&backward_kernel<N, kWidth, kLargeShared, kDk, kDv>,
         {blocks, dim3(static_cast<unsigned>(backward_shape(N::kF32, kWidth, kLargeShared).threads())),
          static_cast<std::size_t>(backward_shared(N::kF32, kWidth, kLargeShared))},
         stream, params);
}

template <class N, Width kWidth>
void launch_backward(const BackwardParams& params, cudaStream_t stream) {
  if constexpr (two_passes(kWidth)) {
    launch_backward_pass<N, kWidth, false, false, true>(params, stream);
    launch_backward_pass<N, kWidth, false, true, false>(params, stream);
    return;
  } else if constexpr (kWidth == Width::w128 && !N::kF32) {
    if (params.large_shared) return launch_backward_pass<N, kWidth, true, true, true>(params, stream);
  }
  if constexpr (!two_passes(kWidth)) launch_backward_pass<N, kWidth, false, true, true>(params, stream);
}

template <class N>
void run_backward(Width width, const BackwardParams& params, cudaStream_t stream) {
  if constexpr (N::kF32) {
    if (width == Width::w128) return launch_backward<N, Width::w128>(params, stream);
    launch_backward<N, Width::w256>(params, stream);
  } else {
    dispatch_width(width, [&]<Width kWidth>() { launch_backward<N, kWidth>(params, stream); });
  }
}

}  // namespace weft::cuda
