// The forward kernel, and which variant of it a call launches.
#pragma once

#include "cuda/launch.h"
#include "kernel/cuda/sm90/forward/consumer.cuh"

namespace weft::cuda::sm90 {

template <class N, Width kWidth, Variant kVariant>
__global__ void __launch_bounds__(forward_shape(kWidth).threads(), 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr ForwardShape kShape = forward_shape(kWidth);
  extern __shared__ __align__(1024) unsigned char memory[];
  const SharedMemory<kWidth> shared{shared_address(memory)};
  if (threadIdx.x == 0) shared.init();
  if constexpr (kVariant == Variant::steps) griddepcontrol_launch_dependents();
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    setmaxnreg_dec<kShape.producer_registers>();
    if (threadIdx.x == 0) Producer<kWidth, has_splits(kVariant)>{params, shared}.run();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (kVariant == Variant::steps && warp > 0) griddepcontrol_wait();
    if (threadIdx.x == 32) load_v<kWidth>(params, shared);
    if (warp == 2) zero_fill_v<kWidth>(params, shared);
    if (warp == 3) write_rows_without_slices(params);
  } else {
    setmaxnreg_inc<kShape.consumer_registers>();
    if constexpr (kVariant == Variant::steps) griddepcontrol_wait();
    ForwardConsumer<N, kWidth, kVariant>(params, shared, warpgroup - 1).run();
  }
#else
  __trap();  // compiled for another GPU; the registry never launches it there
#endif
}

template <class N, Width kWidth, Variant kVariant>
void launch_forward(const ForwardParams& params, cudaStream_t stream) {
  constexpr ForwardShape kShape = forward_shape(kWidth);
  const int blocks = min(params.tiles * params.units * params.splits.items(), params.sm_count);
  launch(&forward_kernel<N, kWidth, kVariant>,
         {dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(kShape.threads())),
          static_cast<std::size_t>(kShape.shared_bytes()), kVariant == Variant::steps},
         stream, params);
}

template <class N, Width kWidth>
void launch_width(const ForwardParams& params, cudaStream_t stream) {
  const bool general = params.scores.softcap_scale != 0 || params.sign != 1.0f || params.max_logit != nullptr ||
                       params.partial.states != nullptr;
  const bool splits = params.splits.max_splits > 1;
  (general ? splits ? launch_forward<N, kWidth, Variant::general_splits> : launch_forward<N, kWidth, Variant::general>
   : params.steps.sums != nullptr ? launch_forward<N, kWidth, Variant::steps>
   : splits                       ? launch_forward<N, kWidth, Variant::splits>
                                  : launch_forward<N, kWidth, Variant::plain>)(params, stream);
}

template <class N>
void run_forward(Width width, const ForwardParams& params, cudaStream_t stream) {
  dispatch_width(width, [&]<Width kWidth>() { launch_width<N, kWidth>(params, stream); });
}

}  // namespace weft::cuda::sm90
