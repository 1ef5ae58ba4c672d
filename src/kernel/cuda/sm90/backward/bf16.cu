#include "kernel/cuda/sm90/backward/backward.cuh"

namespace weft::cuda::sm90 {

void backward_bf16(Width width, const BackwardCall& call, cudaStream_t stream) {
  launch_any<Bf16>(width, call, stream);
}

}  // namespace weft::cuda::sm90
