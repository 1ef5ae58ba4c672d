#include "kernel/cuda/sm90/forward/launch.cuh"

namespace weft::cuda::sm90 {

void forward_bf16(Width width, const ForwardParams& params, cudaStream_t stream) {
  launch_any<Bf16>(width, params, stream);
}

}  // namespace weft::cuda::sm90
