#include "kernel/cuda/portable/forward.cuh"

namespace weft::cuda {

void forward_f16(Width width, const ForwardCall& call, cudaStream_t stream) {
  switch (width) {
    case Width::w64:
      return launch_forward<F16, Width::w64>(call, stream);
    case Width::w128:
      return launch_forward<F16, Width::w128>(call, stream);
    case Width::w192_128:
      return launch_forward<F16, Width::w192_128>(call, stream);
    default:
      return launch_forward<F16, Width::w256>(call, stream);
  }
}

}  // namespace weft::cuda
