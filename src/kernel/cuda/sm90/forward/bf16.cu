#include "kernel/cuda/sm90/forward/launch.cuh"

namespace weft::cuda::sm90 {

void forward_bf16(Width width, const ForwardCall& call, cudaStream_t stream) { launch_any<Bf16>(width, call, stream); }

}  // namespace weft::cuda::sm90
