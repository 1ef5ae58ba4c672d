#include "kernel/cuda/portable/backward.cuh"

namespace weft::cuda {

void backward_bf16(Width width, const BackwardParams& params, cudaStream_t stream) {
  launch_any<Bf16>(width, params, stream);
}

}  // namespace weft::cuda
