#include "kernel/cuda/sm90/backward/dq.cuh"

namespace weft::cuda::sm90 {

void dq_bf16(Width width, const DqParams& params, cudaStream_t stream) { launch_any<Bf16>(width, params, stream); }

}  // namespace weft::cuda::sm90
