#include "kernel/cuda/sm90/backward/backward.cuh"

namespace weft::cuda::sm90 {

void backward_f16(Width width, const BackwardCall& call, cudaStream_t stream) { launch_any<F16>(width, call, stream); }

}  // namespace weft::cuda::sm90
