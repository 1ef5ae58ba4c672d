// Gradients of widths above 256. A block owns some keys, and computes their dK and dV, or some query rows, and computes
// their dQ; it iterates over the other side. Of its eight warps four compute P from scores and four dP; P goes to the
// latter through shared memory, and dS back. Then all add to sums of their own columns, which stay in registers until
// the end: no two blocks add to the same row, and bits are the same on every run.
#pragma once

#include <type_traits>

#include "cuda/launch.h"
#include "kernel/cuda/portable/probabilities.cuh"

namespace weft::cuda {

template <class N, bool kLargeShared, bool kOwnsKeys>
struct WideGradientTile {
  static constexpr int kDimQk = columns_k(Width::w576_512), kDimV = columns_v(Width::w576_512);
  static constexpr int kRows = wide_gradient_rows(N::kF32), kStages = wide_gradient_stages(N::kF32, kLargeShared);
  static constexpr int kPitch = wide_pitch(kRows), kHalf = kWideWarps / 2;
  static constexpr int kM = kRows / 16;  // blocks of 16 rows; a warp has one and one of 16 others in P or dP
  static_assert(kM * kM <= kHalf);
  // Shared memory: the block's rows of K and V (or Q and dO), stages of the others, dS and P as operands
  // [kRows][kPitch], P·slope in register layout, {lse·log2(e), delta} of query rows, live keys.
  static constexpr unsigned kElementBytes = 2 * N::kParts, kQkBytes = kElementBytes * kRows * kDimQk,
                            kVBytes = kElementBytes * kRows * kDimV, kSideBytes = kQkBytes + kVBytes,
                            kDsAt = (1 + kStages) * kSideBytes, kPAt = kDsAt + kElementBytes * kRows * kPitch,
                            kWeightsAt = kPAt + kElementBytes * kRows * kPitch,
                            kStatisticsAt = kWeightsAt + 4 * kRows * kRows,
                            kLiveAt = kStatisticsAt + 8 * kStages * kRows;
  static_assert(kLiveAt + kRows == wide_gradient_shared(N::kF32, kLargeShared));

  using Iterator = std::conditional_t<kOwnsKeys, QueryTileIterator<kRows, kRows>, KeyTileIterator<kRows, kRows>>;
  using QkBlocks = Blocks<kRows, kDimQk>;
  using VBlocks = Blocks<kRows, kDimV>;
  using FactorBlocks = Blocks<kRows, kPitch>;
  using Scores = float[1][2][4];
  struct Step {
    WorkSlice slice;
    int base, stage;
  };

  const BackwardParams& params;
  unsigned shared;
  int tile, head;  // head: of K and V if the block owns keys, else of Q

  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32) % kHalf; }  // of its half
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ int first() const { return tile * kRows; }
  // What the warp has of P or dP, from the tile's first rows on.
  __device__ static bool has_scores() { return warp() < kM * kM; }
  __device__ static int own_row() { return warp() / kM * 16; }
  __device__ static int other_row() { return warp() % kM * 16; }

  __device__ unsigned own_v() const { return shared + kQkBytes; }
  __device__ unsigned other_qk(int stage) const { return shared + static_cast<unsigned>(1 + stage) * kSideBytes; }
  __device__ unsigned other_v(int stage) const { return other_qk(stage) + kQkBytes; }
  __device__ unsigned statistics(int stage, int r) const {
    return shared + kStatisticsAt + static_cast<unsigned>(8 * ((kOwnsKeys ? stage * kRows : 0) + r));
  }
  __device__ unsigned weights(int n) const {
    return shared + kWeightsAt + static_cast<unsigned>(16 * ((warp() * 2 + n) * 32 + lane()));
  }

  __device__ Iterator others() const {
    if constexpr (kOwnsKeys)
      return Iterator(params.keys, params.heads, tile, head);
    else
      return Iterator(params.rows, tile);
  }
  __device__ bool live(int r) const { return load_byte(shared + kLiveAt + static_cast<unsigned>(r)); }

  __device__ void load_own() const {
    if constexpr (kOwnsKeys) {
      const auto is_live = [&](int r) { return live(r); };
      load_tile<N, kRows, kDimQk, kWideThreads>(shared, params.k, first(), head, is_live);
      load_tile<N, kRows, kDimV, kWideThreads>(own_v(), params.v, first(), head, is_live);
    } else {
      const int rows = static_cast<int>(params.q.view.rows), from = first();
      const auto valid = [=](int r) { return from + r < rows; };
      load_tile<N, kRows, kDimQk, kWideThreads>(shared, params.q, from, head, valid);
      load_tile<N, kRows, kDimV, kWideThreads>(own_v(), params.dout, from, head, valid);
      load_statistics(0, head, from);
    }
  }
  __device__ void load_others(const Iterator& at, int stage) const {
    if constexpr (kOwnsKeys) {
      load_tile<N, kRows, kDimQk, kWideThreads>(other_qk(stage), params.q, at.base(), at.head(), at.valid());
      load_tile<N, kRows, kDimV, kWideThreads>(other_v(stage), params.dout, at.base(), at.head(), at.valid());
      load_statistics(stage, at.head(), at.base());
    } else {
      const int kv_head = params.heads.kv_head[head];
      load_tile<N, kRows, kDimQk, kWideThreads>(other_qk(stage), params.k, at.base(), kv_head, at.valid());
      load_tile<N, kRows, kDimV, kWideThreads>(other_v(stage), params.v, at.base(), kv_head, at.valid());
    }
  }
  __device__ void load_statistics(int stage, int of_head, int row) const {
    const float2* from = params.statistics + static_cast<Index>(of_head) * params.padded_rows + row;
    const int r = static_cast<int>(threadIdx.x);
    if (r < kRows) cp_async_8(statistics(stage, r), from + r);
  }

  __device__ void run() const {
    if constexpr (kOwnsKeys) {
      for (int r = static_cast<int>(threadIdx.x); r < kRows; r += kWideThreads)
        store_byte(shared + kLiveAt + static_cast<unsigned>(r), key_is_live(params.keys, tile, first() + r));
      __syncthreads();
    }
    if (threadIdx.x < 32 * kHalf)
      run_half<true>();
    else
      run_half<false>();
  }

  // The first half of the warps computes dP and dS, and then dK; the second P, and then dV. They divide dQ such that
  // both have as much to multiply.
  template <bool kDs>
  __device__ void run_half() const {
    constexpr int kColumns = (kOwnsKeys ? (kDs ? kDimQk : kDimV) : kDs ? 384 : 192) / kHalf;
    const int column = (kOwnsKeys || kDs ? 0 : 384) + warp() * kColumns;
    float sums[kM][kColumns / 8][4];
    clear(sums);
    Iterator at = others();
    bool more = at.start();
    if (more) {
      load_own();
      load_others(at, 0);
    }
    int stage = 0;
    while (more) {
      cp_async_wait_all();
      __syncthreads();
      const Step step{at.slice(), at.base(), stage};
      more = at.next();
      if (kStages > 1) {
        stage ^= 1;
        if (more) load_others(at, stage);
      }
      add_step<kDs>(sums, step, column);
      if (kStages == 1) {
        __syncthreads();
        if (more) load_others(at, stage);
      }
    }
    end<kDs>(sums, column);
  }

  template <bool kDs, int kN8>
  __device__ void add_step(float (&sums)[kM][kN8][4], const Step& step, int column) const {
    const Visibility visibility =
        kOwnsKeys ? visibility_of(step.slice, step.base, step.base + kRows - 1, first(), first() + kRows - 1)
                  : visibility_of(step.slice, first(), first() + kRows - 1, step.base, step.base + kRows - 1);
    if (visibility == Visibility::none) return;  // the same for all warps
    if (kDs) {
      Scores d;
      if (has_scores())
        mma_in_two_chains<N, kDimV / 16>(d, LeftRows<VBlocks>{VBlocks(own_v(), own_row())},
                                         RightRows<VBlocks>{VBlocks(other_v(step.stage), other_row())});
      sync(kWeightsReady, kWideThreads);
      if (has_scores()) store_ds(d, step);
      sync(kDsReady, kOwnsKeys ? 32 * kHalf : kWideThreads);
    } else {
      Scores p;
      if (has_scores()) {
        mma_in_two_chains<N, kDimQk / 16>(p, LeftRows<QkBlocks>{QkBlocks(shared, own_row())},
                                          RightRows<QkBlocks>{QkBlocks(other_qk(step.stage), other_row())});
        store_probabilities(p, step, visibility == Visibility::partial);
      }
      sync(kWeightsReady, kWideThreads);
      if (!kOwnsKeys) sync(kDsReady, kWideThreads);
    }
    const unsigned factor = shared + (kOwnsKeys && !kDs ? kPAt : kDsAt);
    const LeftRows<FactorBlocks> left{FactorBlocks(factor, 0)};
    if constexpr (kOwnsKeys && !kDs)
      mma_tiles<N, kRows / 16>(sums, left, RightColumns<VBlocks>{VBlocks(other_v(step.stage), 0), column / 16});
    else
      mma_tiles<N, kRows / 16>(sums, left, RightColumns<QkBlocks>{QkBlocks(other_qk(step.stage), 0), column / 16});
  }

  // Barriers of some warps.
  static constexpr int kWeightsReady = 1, kDsReady = 2;
  __device__ static void sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
  }

  // Scores become P, as an operand, and P times the slope of softcap, for dS.
  __device__ void store_probabilities(Scores& p, const Step& step, bool masked) const {
    const int column = other_row() + 2 * (lane() % 4);
    Scores weighted;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = own_row() + lane() / 4 + 8 * i;
      VisibleRange seen{0, kRows - 1};
      if (masked)
        seen = kOwnsKeys ? visible_rows(step.slice, first() + r, step.base)
                         : visible_keys(step.slice, first() + r, step.base);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int c = column + n * 8 + j;
          float& score = p[0][n][2 * i + j];
          float slope = 1;
          if (params.scores.softcap_scale != 0) score = softcapped(params.scores.softcap_scale, score, slope);
          const float lse = load_float(statistics(step.stage, kOwnsKeys ? c : r));
          score = c >= seen.first && c <= seen.last ? probability_of(params.scores, score, lse) : 0.0f;
          weighted[0][n][2 * i + j] = score * slope;
        }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float(&w)[4] = weighted[0][n];
      asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};\n" ::"r"(weights(n)), "f"(w[0]), "f"(w[1]), "f"(w[2]),
                   "f"(w[3])
                   : "memory");
    }
    if (kOwnsKeys) store_packed<N, kRows, kPitch>(shared + kPAt, own_row(), other_row() / 8, p);
  }

  // dP becomes dS, as an operand. The scale is applied before it is rounded, to use the range of f16.
  __device__ void store_ds(Scores& d, const Step& step) const {
    const int column = other_row() + 2 * (lane() % 4);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float w[4];
      asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];\n"
                   : "=f"(w[0]), "=f"(w[1]), "=f"(w[2]), "=f"(w[3])
                   : "r"(weights(n))
                   : "memory");
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = own_row() + lane() / 4 + 8 * (i / 2), c = column + n * 8 + i % 2;
        const float delta = load_float(statistics(step.stage, kOwnsKeys ? c : r) + 4);
        d[0][n][i] = w[i] * (d[0][n][i] * params.scale - params.scale * delta);
      }
    }
    store_packed<N, kRows, kPitch>(shared + kDsAt, own_row(), other_row() / 8, d);
  }

  template <bool kDs, int kN8>
  __device__ void end(const float (&sums)[kM][kN8][4], int column) const {
    const int row = first() + lane() / 4;
    column += 2 * (lane() % 4);
    if constexpr (kOwnsKeys)
      store_gradient(kDs ? params.dk : params.dv, row, head, column, params.add_keys, sums, [&](int r) {
        return live(r - first()) && params.heads.begin[head] < params.heads.begin[head + 1];
      });
    else
      store_gradient(params.dq, row, head, column, false, sums,
                     [&](int r) { return row_is_live(params.rows, tile, r); });
  }
};

template <class N, bool kLargeShared, bool kOwnsKeys>
__global__ void __launch_bounds__(kWideThreads, 1) wide_gradient_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int block = static_cast<int>(blockIdx.x);
  const WorkList& list = kOwnsKeys ? params.keys : params.rows;
  const int item = kOwnsKeys ? block % params.key_tiles : block / params.heads_q,
            head = kOwnsKeys ? block / params.key_tiles : block % params.heads_q;
  if (item >= *list.tiles) return;
  WideGradientTile<N, kLargeShared, kOwnsKeys>{params, shared_address(shared), list.order[item], head}.run();
}

template <class N, bool kLargeShared>
void launch_wide_backward(const BackwardParams& params, cudaStream_t stream) {
  const auto blocks = [](int tiles, int heads) {
    return dim3(static_cast<unsigned>(tiles) * static_cast<unsigned>(heads));
  };
  const std::size_t shared = wide_gradient_shared(N::kF32, kLargeShared);
  launch(&wide_gradient_kernel<N, kLargeShared, true>,
         {blocks(params.key_tiles, params.heads_k), dim3(kWideThreads), shared}, stream, params);
  launch(&wide_gradient_kernel<N, kLargeShared, false>,
         {blocks(params.row_tiles, params.heads_q), dim3(kWideThreads), shared}, stream, params);
}

template <class N>
void run_wide_backward(const BackwardParams& params, cudaStream_t stream) {
  if constexpr (!N::kF32)
    if (params.large_shared) return launch_wide_backward<N, true>(params, stream);
  launch_wide_backward<N, false>(params, stream);
}

}  // namespace weft::cuda
