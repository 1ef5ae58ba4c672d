#include "kernel/cuda/portable/dq.cuh"

namespace weft::cuda {
namespace {

template <class N>
void run(Width width, const BackwardCall& call, cudaStream_t stream) {
  if (dq_width(width) == Width::w128) return launch_dq<N, Width::w128>(call, stream);
  launch_dq<N, Width::w256>(call, stream);
}

}  // namespace

void dq_bf16(Width width, const BackwardCall& call, cudaStream_t stream) { run<Bf16>(width, call, stream); }
void dq_f16(Width width, const BackwardCall& call, cudaStream_t stream) { run<F16>(width, call, stream); }
void dq_f32(Width width, const BackwardCall& call, cudaStream_t stream) { run<F32>(width, call, stream); }

}  // namespace weft::cuda
