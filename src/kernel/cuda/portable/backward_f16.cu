#include "kernel/cuda/portable/backward.cuh"

namespace weft::cuda {

void backward_f16(Width width, const BackwardParams& params, cudaStream_t stream) {
  launch_any<F16>(width, params, stream);
}

}  // namespace weft::cuda
