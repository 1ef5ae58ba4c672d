#include "kernel/cuda/portable/backward.cuh"

namespace weft::cuda {

void backward_f32(Width width, const BackwardParams& params, cudaStream_t stream) {
  launch_any<F32>(width, params, stream);
}

}  // namespace weft::cuda
