#include "kernel/cuda/portable/backward.cuh"

namespace weft::cuda {

void backward_f16(Width width, const BackwardCall& call, cudaStream_t stream) {
  switch (width) {
    case Width::w64:
      return launch_backward<F16, Width::w64>(call, stream);
    case Width::w128:
      return launch_backward<F16, Width::w128>(call, stream);
    case Width::w192_128:
      return launch_backward<F16, Width::w192_128>(call, stream);
    default:
      return launch_backward<F16, Width::w256>(call, stream);
  }
}

}  // namespace weft::cuda
