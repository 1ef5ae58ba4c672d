#include "kernel/cuda/portable/backward.cuh"

namespace weft::cuda {

void backward_f32(Width width, const BackwardParams& params, cudaStream_t stream) {
  if (width == Width::w128) return launch_backward<F32, Width::w128>(params, stream);
  launch_backward<F32, Width::w256>(params, stream);
}

}  // namespace weft::cuda
