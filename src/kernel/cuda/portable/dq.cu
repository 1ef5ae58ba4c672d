#include "kernel/cuda/portable/dq.cuh"

namespace weft::cuda {
namespace {

template <class N>
void run(Width width, const BackwardParams& params, cudaStream_t stream) {
  if (dq_width(width) == Width::w128) return launch_dq<N, Width::w128>(params, stream);
  launch_dq<N, Width::w256>(params, stream);
}

}  // namespace

void dq_bf16(Width width, const BackwardParams& params, cudaStream_t stream) { run<Bf16>(width, params, stream); }
void dq_f16(Width width, const BackwardParams& params, cudaStream_t stream) { run<F16>(width, params, stream); }
void dq_f32(Width width, const BackwardParams& params, cudaStream_t stream) { run<F32>(width, params, stream); }

}  // namespace weft::cuda
