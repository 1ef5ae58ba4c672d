#include "kernel/cuda/sm90/backward/wide.cuh"

namespace weft::cuda::sm90 {

void backward_wide_bf16(Width width, const BackwardParams& params, cudaStream_t stream) {
  launch_any_wide<Bf16>(width, params, stream);
}

}  // namespace weft::cuda::sm90
