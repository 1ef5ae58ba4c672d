// The backward kernel up to 192 columns (V: 128). One persistent launch has as many blocks as SMs, and each block
// claims items until none are left.
//
// An item is 128 keys of one K/V head (192 at 64 columns); the block iterates over all query rows that see them, for
// all heads of the group. dK and dV stay in registers, are written once, and have the same bits on every run.
//
// A consumer warpgroup has 64 keys. S^T = K·Q^T and dP^T = V·dO^T are its accumulators, so P^T and dS^T are already in
// registers as A operands of dV and dK. Only dS goes through shared memory, for dQ = dS·K: each consumer computes a
// part of it from all keys, one step late, and adds it to f32 sums in global memory. With Dq::ordered it leaves the
// part in shared memory for a thread that waits until all earlier additions are done.
//
// Up to 128 columns two consumers ping-pong with one or two slots per step (has_one_slot). Three, and the two of
// half_tiles.cuh, do not.
#pragma once

#include "cuda/launch.h"
#include "kernel/cuda/sm90/backward/half_tiles.cuh"
#include "kernel/cuda/sm90/backward/one_slot.cuh"
#include "kernel/cuda/sm90/backward/three_warpgroups.cuh"
#include "kernel/cuda/sm90/backward/two_slots.cuh"

namespace weft::cuda::sm90 {

template <class N, Width kWidth, bool kSoftcap, Dq kDq>
__global__ void __launch_bounds__(backward_shape(kWidth).threads(), 1)
    backward_kernel(const __grid_constant__ BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  const BackwardSharedMemory<kWidth, kDq> shared = begin_block<kWidth, kDq>(params, memory);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), warpgroup = warp / 4;
  if (warpgroup == 0) {
    run_producer<kWidth, kDq>(params, shared, warp);
  } else {
    constexpr BackwardShape kShape = backward_shape(kWidth, kDq);
    setmaxnreg_inc<kShape.consumer_registers()>();
    if constexpr (kShape.consumers == 3)
      ThreeWarpgroups<N, kWidth, kDq>(params, shared, warpgroup - 1).run();
    else if constexpr (kWidth == Width::w192_128)
      HalfTiles<N, kWidth, kSoftcap, kDq>(params, shared, warpgroup - 1).run();
    else if constexpr (has_one_slot(kWidth, kDq))
      OneSlot<N, kWidth, kSoftcap, kDq>(params, shared, warpgroup - 1).run();
    else
      TwoSlots<N, kWidth, kSoftcap, kDq>(params, shared, warpgroup - 1).run();
  }
#else
  __trap();  // compiled for another GPU; the registry never launches it there
#endif
}

template <class N, Width kWidth, bool kSoftcap>
void launch_backward(const BackwardParams& params, cudaStream_t stream) {
  constexpr BackwardShape kOrderedShape = backward_shape(kWidth, Dq::ordered);
  constexpr int kUnordered = backward_shape(kWidth, Dq::atomic).shared_bytes(),
                kOrderedDq = kOrderedShape.fits_ordered_dq() ? kOrderedShape.shared_bytes_ordered() : 0;
  static_assert(max_of(kOrderedDq, kUnordered) <= 227 * 1024);
  const bool ordered_dq = params.additions != nullptr;
  auto kernel = params.dq_sums != nullptr ? &backward_kernel<N, kWidth, kSoftcap, Dq::atomic>
                                          : &backward_kernel<N, kWidth, kSoftcap, Dq::separate_kernel>;
  if constexpr (kOrderedShape.fits_ordered_dq())
    if (ordered_dq) kernel = &backward_kernel<N, kWidth, kSoftcap, Dq::ordered>;
  launch(
      kernel,
      {dim3(static_cast<unsigned>(min(max(params.keys.active, params.unseen_tiles) * params.heads_k, params.sm_count))),
       dim3(backward_shape(kWidth).threads()), static_cast<std::size_t>(ordered_dq ? kOrderedDq : kUnordered),
       params.programmatic},
      stream, params);
}

template <class N>
void run_backward(Width width, const BackwardParams& params, cudaStream_t stream) {
  const bool softcap = params.scores.softcap_scale != 0;
  if (width == Width::w64)
    launch_backward<N, Width::w64, false>(params, stream);
  else if (width == Width::w128)
    softcap ? launch_backward<N, Width::w128, true>(params, stream)
            : launch_backward<N, Width::w128, false>(params, stream);
  else
    softcap ? launch_backward<N, Width::w192_128, true>(params, stream)
            : launch_backward<N, Width::w192_128, false>(params, stream);
}

}  // namespace weft::cuda::sm90
