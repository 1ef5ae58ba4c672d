#include "kernel/cuda/sm90/backward/launch.cuh"

namespace weft::cuda::sm90 {

void backward_bf16(Width width, const BackwardParams& params, cudaStream_t stream) {
  launch_any<Bf16>(width, params, stream);
}

}  // namespace weft::cuda::sm90
