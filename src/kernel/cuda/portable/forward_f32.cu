#include "kernel/cuda/portable/forward.cuh"

namespace weft::cuda {

void forward_f32(Width width, const ForwardParams& params, cudaStream_t stream) {
  if (width == Width::w128) return launch_forward<F32, Width::w128>(params, stream);
  launch_forward<F32, Width::w256>(params, stream);
}

}  // namespace weft::cuda
