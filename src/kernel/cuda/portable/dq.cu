#include "kernel/cuda/portable/dq.cuh"

namespace weft::cuda {

template <class N>
void run_dq(Width width, const BackwardParams& params, cudaStream_t stream) {
  if (dq_width(width) == Width::w128) return launch_dq<N, Width::w128>(params, stream);
  launch_dq<N, Width::w256>(params, stream);
}
template void run_dq<Bf16>(Width, const BackwardParams&, cudaStream_t);
template void run_dq<F16>(Width, const BackwardParams&, cudaStream_t);
template void run_dq<F32>(Width, const BackwardParams&, cudaStream_t);

}  // namespace weft::cuda
