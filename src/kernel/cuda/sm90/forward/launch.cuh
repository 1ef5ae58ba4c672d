// The forward's kernels, and which of them a call takes.
#pragma once

#include "cuda/launch.h"
#include "kernel/cuda/sm90/forward/forward.cuh"

namespace weft::cuda::sm90 {

template <class N, Width kWidth, Form kForm>
__global__ void __launch_bounds__(forward_shape(kWidth).threads(), 1)
    forward_kernel(const __grid_constant__ ForwardCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr ForwardShape kShape = forward_shape(kWidth);
  extern __shared__ __align__(1024) unsigned char memory[];
  const Shared<kWidth> shared{shared_address(memory)};
  if (threadIdx.x == 0) shared.init();
  if constexpr (kForm == Form::steps) let_next_begin();
  __syncthreads();
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == 0) {
    give_registers<kShape.fetch_registers>();
    if (threadIdx.x == 0) Fetch<kWidth, takes_parts(kForm)>{call, shared}.run();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (kForm == Form::steps && warp > 0) await_before();
    if (threadIdx.x == 32) fetch_values<kWidth>(call, shared);
    if (warp == 2) mend<kWidth>(call, shared);
    if (warp == 3) clear_rest(call);
  } else {
    take_registers<kShape.math_registers>();
    if constexpr (kForm == Form::steps) await_before();
    ForwardMath<N, kWidth, kForm>(call, shared, group - 1).run();
  }
#else
  __trap();  // compiled for another GPU: the registry does not come here
#endif
}

template <class N, Width kWidth, Form kForm>
void launch_forward(const ForwardCall& call, cudaStream_t stream) {
  constexpr ForwardShape kShape = forward_shape(kWidth);
  const int blocks = min(call.tiles * call.units * call.parts.items(), call.processors);
  launch(&forward_kernel<N, kWidth, kForm>,
         {dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(kShape.threads())),
          static_cast<std::size_t>(kShape.shared_bytes()), kForm == Form::steps},
         stream, call);
}

template <class N, Width kWidth>
void launch_width(const ForwardCall& call, cudaStream_t stream) {
  const bool more =
      call.scores.bend != 0 || call.sign != 1.0f || call.max_logit != nullptr || call.partial.states != nullptr;
  const bool parts = call.parts.most > 1;
  (more ? parts ? launch_forward<N, kWidth, Form::any_parts> : launch_forward<N, kWidth, Form::any>
   : call.steps.sums != nullptr ? launch_forward<N, kWidth, Form::steps>
   : parts                      ? launch_forward<N, kWidth, Form::parts>
                                : launch_forward<N, kWidth, Form::plain>)(call, stream);
}

template <class N>
void launch_any(Width width, const ForwardCall& call, cudaStream_t stream) {
  switch (width) {
    case Width::w64:
      launch_width<N, Width::w64>(call, stream);
      break;
    case Width::w128:
      launch_width<N, Width::w128>(call, stream);
      break;
    case Width::w192_128:
      launch_width<N, Width::w192_128>(call, stream);
      break;
    default:
      launch_width<N, Width::w256>(call, stream);
  }
}

}  // namespace weft::cuda::sm90
