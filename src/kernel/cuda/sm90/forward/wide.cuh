// The forward of widths above 256 by WGMMA: the blocks, steps and rows of portable/wide_forward.cuh, with products of
// warpgroups. Each of the two has the scores of 32 of 64 keys, and then 256 columns of V. Where V is the first columns
// of K, as in latent attention, a tile is loaded once for both.
#pragma once

#include "kernel/cuda/portable/wide_forward.cuh"
#include "kernel/cuda/sm90/forward/params.h"
#include "kernel/cuda/sm90/fragments.cuh"
#include "kernel/cuda/sm90/ptx/ptx.cuh"
#include "kernel/cuda/sm90/ptx/wgmma.cuh"

namespace weft::cuda::sm90 {

// Boxes of 64 columns, as WGMMA reads them.
template <int kTileRows>
struct SwizzledBoxes {
  static constexpr unsigned kBoxBytes = 128 * kTileRows;
  __device__ static unsigned offset(int row, int piece) {
    return static_cast<unsigned>(piece / 8) * kBoxBytes + swizzled_offset<64>(row, piece % 8);
  }
};

template <class N_>
struct WgmmaProducts {
  using N = N_;
  static constexpr int kDimQk = columns_k(Width::w576_512), kDimV = columns_v(Width::w576_512);
  static constexpr int kRows = kWideSm90Shape.rows, kKeys = kWideSm90Shape.keys, kPitch = 64;
  static_assert(kRows == 64 && kKeys == 64);  // all tiles have boxes of 64 rows
  static constexpr int kScoreM = 1, kScoreN8 = 4, kKeyWarps = 2, kScoreWarps = kWideWarps;
  static constexpr int kM = 1, kOwn = kDimV / 2;
  static constexpr int kScoreGroup = kRows, kSumGroup = kRows;
  static constexpr bool kSkips = false;
  static constexpr bool kBf16 = std::is_same_v<N, Bf16>;
  static constexpr unsigned kBoxBytes = SwizzledBoxes<64>::kBoxBytes;
  template <int kTileRows, int kColumns>
  using Layout = SwizzledBoxes<kTileRows>;

  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int key_warp() { return warp() / 4; }
  __device__ static int column_warp() { return warp() / 4; }
  __device__ static int score_row() { return warp() % 4 * 16; }
  __device__ static int sum_row() { return score_row(); }

  // Before a barrier: what this thread wrote to shared memory, WGMMA reads.
  __device__ static void publish() { fence_proxy_async_shared(); }

  // Issued, and awaited: tiles are asked for in between.
  __device__ static void begin_scores(float (&to)[1][kScoreN8][4], unsigned q, unsigned k) {
    float(&d)[16] = reinterpret_cast<float(&)[16]>(to);
    const unsigned a = smem_descriptor(q),
                   b = warp_uniform(smem_descriptor(k + 128 * 32 * static_cast<unsigned>(key_warp())));
    warpgroup_fence_operand(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDimQk / 16; ++step) {
      const unsigned bytes = static_cast<unsigned>(step / 4) * kBoxBytes + static_cast<unsigned>(step % 4) * 32;
      wgmma<kBf16>(d, advance_descriptor(a, bytes), advance_descriptor(b, bytes), step > 0);
    }
    wgmma_commit_group();
  }
  __device__ static void end_scores(float (&to)[1][kScoreN8][4], unsigned, unsigned) {
    wgmma_wait_group<0>();
    warpgroup_fence_operand(reinterpret_cast<float(&)[16]>(to));
  }

  __device__ static void begin_add(float (&sums)[1][kOwn / 8][4], unsigned p, unsigned v) {
    float(&d)[128] = reinterpret_cast<float(&)[128]>(sums);
    const unsigned a = smem_descriptor(p), columns = kOwn / 64 * kBoxBytes * static_cast<unsigned>(column_warp()),
                   b = warp_uniform(smem_descriptor<kBoxBytes>(v + columns));
    warpgroup_fence_operand(d);
    wgmma_fence();
#pragma unroll
    for (unsigned step = 0; step < kKeys / 16; ++step)
      wgmma_b_mn_major<kBf16>(d, advance_descriptor(a, 32 * step), advance_descriptor(b, 2048 * step), true);
    wgmma_commit_group();
  }
  __device__ static void end_add(float (&sums)[1][kOwn / 8][4], unsigned, unsigned) {
    wgmma_wait_group<0>();
    warpgroup_fence_operand(reinterpret_cast<float(&)[128]>(sums));
  }
};

template <class N, bool kVIsK>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_forward_kernel(const __grid_constant__ cuda::ForwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char wide_memory[];
  run_wide_tile<WideForwardTile<WgmmaProducts<N>, kVIsK>>(params, wide_memory);
#else
  __trap();  // compiled for another GPU; the registry never launches it there
#endif
}

template <class N>
void run_wide_forward(bool v_is_k, const cuda::ForwardParams& params, cudaStream_t stream) {
  using Products = WgmmaProducts<N>;
  if (v_is_k)
    launch_wide_forward(&wide_forward_kernel<N, true>, WideForwardTile<Products, true>::kSharedBytes, params, stream);
  else
    launch_wide_forward(&wide_forward_kernel<N, false>, WideForwardTile<Products>::kSharedBytes, params, stream);
}

}  // namespace weft::cuda::sm90
