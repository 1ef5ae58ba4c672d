// The backward on Hopper: one launch, as many blocks as multiprocessors, each taking items until there are none left.
//
// An item is 128 keys of one K/V head (192 at 64 columns), and all query rows that see them pass by, for all heads of
// the group. dK and dV stay in registers, are written once, and have the same bits on every run.
//
// A warpgroup has 64 keys. S^T = K·Q^T and dP^T = V·dO^T are its sums, so P^T and dS^T are in its registers as the
// products for dV and dK want them. dS alone goes through shared memory, for dQ = dS·K, of which each warpgroup makes a
// part from all keys, one step late, and adds it to f32 sums in device memory; or, in turn, leaves it in shared memory
// for a thread that waits until all additions that come before have been made.
//
// Two warpgroups take turns at issuing products, one in a step or two (has_one_turn); three do not.
#pragma once

#include <type_traits>

#include "cuda/launch.h"
#include "kernel/cuda/sm90/backward/one_slot.cuh"
#include "kernel/cuda/sm90/backward/three_warpgroups.cuh"
#include "kernel/cuda/sm90/backward/two_slots.cuh"

namespace weft::cuda::sm90 {

template <class N, Width kWidth, bool kBent, Dq kDq>
__global__ void __launch_bounds__(backward_shape(kWidth).threads(), 1)
    backward_kernel(const __grid_constant__ BackwardCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  const BackwardShared<kWidth, kDq> shared = begin_block<kWidth, kDq>(memory);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), group = warp / 4;
  if (group == 0) {
    serve<kWidth, kDq>(call, shared, warp);
  } else {
    constexpr BackwardShape kShape = backward_shape(kWidth, kDq);
    take_registers<kShape.math_registers()>();
    using Two =
        std::conditional_t<has_one_turn(kWidth, kDq), OneTurn<N, kWidth, kBent, kDq>, TwoTurns<N, kWidth, kBent, kDq>>;
    using Math = std::conditional_t<kShape.groups == 3, ThreeGroups<N, kWidth, kDq>, Two>;
    Math(call, shared, group - 1).run();
  }
#else
  __trap();  // compiled for another GPU: the registry does not come here
#endif
}

template <class N, Width kWidth, bool kBent>
void launch_backward(const BackwardCall& call, cudaStream_t stream) {
  constexpr int kInTurn = backward_shape(kWidth, Dq::in_turn).shared_bytes_in_turn(),
                kOther = backward_shape(kWidth, Dq::any_order).shared_bytes();
  static_assert(max_of(kInTurn, kOther) <= 227 * 1024);
  const bool in_turn = call.additions != nullptr;
  const auto kernel = in_turn                   ? &backward_kernel<N, kWidth, kBent, Dq::in_turn>
                      : call.dq_sums != nullptr ? &backward_kernel<N, kWidth, kBent, Dq::any_order>
                                                : &backward_kernel<N, kWidth, kBent, Dq::elsewhere>;
  launch(kernel,
         {dim3(static_cast<unsigned>(min(max(call.keys.active, call.unseen_tiles) * call.heads_k, call.processors))),
          dim3(backward_shape(kWidth).threads()), static_cast<std::size_t>(in_turn ? kInTurn : kOther), call.early},
         stream, call);
}

template <class N>
void launch_any(Width width, const BackwardCall& call, cudaStream_t stream) {
  if (width == Width::w64)
    launch_backward<N, Width::w64, false>(call, stream);
  else if (call.scores.bend == 0)
    launch_backward<N, Width::w128, false>(call, stream);
  else
    launch_backward<N, Width::w128, true>(call, stream);
}

}  // namespace weft::cuda::sm90
