#include "kernel/cuda/sm90/backward/dq.cuh"

namespace weft::cuda::sm90 {

void dq_bf16(Width width, const DqCall& call, cudaStream_t stream) { launch_any<Bf16>(width, call, stream); }

}  // namespace weft::cuda::sm90
