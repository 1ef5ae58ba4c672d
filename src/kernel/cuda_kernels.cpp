#include "kernel/cuda_kernels.h"

#include <algorithm>

#include "kernel/cuda/portable/tile_shape.h"
#include "kernel/registry.h"
#include "text.h"

namespace weft {

namespace {

// Bytes of shared memory that a block of cuda.portable needs.
int portable_shared(const KernelRequest& request) {
  const bool f32 = request.dtype == DType::f32, forward = request.pass == Pass::forward;
  const cuda::Width width = cuda::width_of(request.dtype, request.dim_qk, request.dim_v);
  if (width == cuda::Width::w576_512)
    return forward ? cuda::wide_forward_shared(f32, false) : cuda::wide_gradient_shared(f32, false);
  return forward ? cuda::forward_shared(f32, width)
                 : std::max(cuda::backward_shared(f32, width, false), cuda::dq_shared(f32, cuda::dq_width(width)));
}

}  // namespace

std::optional<std::string> portable_refusal(const GpuProperties& gpu, const KernelRequest& request) {
  constexpr Index kMaxQk = columns_k(cuda::Width::w576_512), kMaxV = columns_v(cuda::Width::w576_512);
  if (request.device != DeviceKind::cuda)
    return "its tensors must lie on a GPU, and these lie in memory of the CPU (place says where)";
  if (!gpu.missing.empty()) return text("there is no GPU: ", gpu.missing);
  if (gpu.major < 8)
    return text("it needs compute capability 8.0 or more, and this GPU has ", gpu.major, ".", gpu.minor);
  if (auto reason = f32_refusal(request.dtype)) return reason;
  if (request.dim_qk > kMaxQk || request.dim_v > kMaxV)
    return text("its tiles are made for head dims up to ", kMaxQk, " of q and k and ", kMaxV, " of v, not ",
                request.dim_qk, " and ", request.dim_v);
  const int needed = portable_shared(request);
  if (needed > gpu.shared_bytes)
    return text("head dims ", request.dim_qk, " and ", request.dim_v, " need ", needed,
                " bytes of shared memory a block, and this GPU has ", gpu.shared_bytes);
  return {};
}

std::optional<std::string> sm90_refusal(const GpuProperties& gpu, const KernelRequest& request) {
  if (auto reason = portable_refusal(gpu, request)) return reason;
  if (gpu.major != 9)
    return text("it needs compute capability 9.0 (Hopper), and this GPU has ", gpu.major, ".", gpu.minor);
  if (request.dtype == DType::f32) return "its products are of bf16 and f16, and would lose digits of f32";
  constexpr Index kMaxDim = 256;
  const Index widest = max_of(request.dim_qk, request.dim_v);
  if (request.pass == Pass::backward && widest > kMaxDim)
    return text("its backward is made for head dims up to ", kMaxDim, ", not ", widest,
                "; cuda.portable has wider ones");
  return {};
}

}  // namespace weft
