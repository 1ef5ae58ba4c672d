#include "kernel/cuda/portable/forward.cuh"

namespace weft::cuda {

void forward_bf16(Width width, const ForwardParams& params, cudaStream_t stream) {
  launch_any<Bf16>(width, params, stream);
}

}  // namespace weft::cuda
