#include "kernel/cuda/portable/forward.cuh"

namespace weft::cuda {

void forward_f32(Width width, const ForwardParams& params, cudaStream_t stream) {
  launch_any<F32>(width, params, stream);
}

}  // namespace weft::cuda
