#include "kernel/cuda/sm90/backward/launch.cuh"

namespace weft::cuda::sm90 {

void backward_f16(Width width, const BackwardParams& params, cudaStream_t stream) {
  launch_any<F16>(width, params, stream);
}

}  // namespace weft::cuda::sm90
