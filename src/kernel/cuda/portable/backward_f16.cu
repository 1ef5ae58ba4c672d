#include "kernel/cuda/portable/backward.cuh"

namespace weft::cuda {

void backward_f16(Width width, const BackwardParams& params, cudaStream_t stream) {
  switch (width) {
    case Width::w64:
      return launch_backward<F16, Width::w64>(params, stream);
    case Width::w128:
      return launch_backward<F16, Width::w128>(params, stream);
    case Width::w192_128:
      return launch_backward<F16, Width::w192_128>(params, stream);
    default:
      return launch_backward<F16, Width::w256>(params, stream);
  }
}

}  // namespace weft::cuda
