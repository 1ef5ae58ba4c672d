#include "kernel/cuda/host.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cuda/runtime.h"
#include "index.h"
#include "kernel/check_args.h"
#include "text.h"

namespace weft::cuda {

constexpr double kLog2E = 1.44269504088896341;

InputView input_view(const ConstTensorView& view, DType compute) {
  const Index size = size_of(view.dtype);
  const auto aligned = [&](Index elements) { return elements * size % 16 == 0; };
  const bool direct = size <= 4 && reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && view.dim % 8 == 0 &&
                      (aligned(view.row_stride) || view.rows == 1) && (aligned(view.head_stride) || view.heads == 1) &&
                      (view.inner == 0 || aligned(view.outer_stride));
  return {view, direct, view.dtype == compute};
}

double scale_of(const Attention& attention, Index dim) {
  return attention.scale.value_or(1 / std::sqrt(static_cast<double>(dim)));
}

void check_grid(Index tiles, Index heads) {
  if (tiles * heads > kMaxTokens)
    throw Error(text(tiles, " tiles of ", heads, " heads on a GPU"), "give it fewer rows or heads at a time");
}

ScoreScale score_scale_of(double scale, double softcap) {
  using Float = std::numeric_limits<float>;
  const double most = Float::max();
  const float softcap_scale = softcap > 0 ? static_cast<float>(std::clamp(scale / softcap, -most, most)) : 0.0f;
  const double x = softcap_scale != 0 ? softcap : scale;
  const float scale_log2 = static_cast<float>(x * kLog2E);
  // A scale below the smallest float would become 0, and -inf times 0 is NaN.
  return {scale_log2 == 0 && x != 0 ? std::copysign(Float::min(), static_cast<float>(x < 0 ? -1 : 1)) : scale_log2,
          softcap_scale};
}

void check_rows(Index rows) {
  constexpr Index kMost = kMaxTokens - 4096;
  if (rows > kMost)
    throw Error(text("a tensor of ", rows, " rows on a GPU"), text("give it at most ", kMost, " at a time"));
}

int sm_count_of(int device) {
  int count = 0;
  WEFT_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

RecomputedForward::RecomputedForward(KernelBackwardArgs& args, void (*forward)(const KernelForwardArgs&),
                                     cudaStream_t stream) {
  if (args.out.given()) return;
  const std::size_t rows = at(args.q.rows * args.q.heads);
  out = StreamArray<float>(rows * at(args.v.dim), stream);
  lse = StreamArray<float>(rows, stream);
  const TensorView out_view = thd(out.get(), DType::f32, args.q.rows, args.q.heads, args.v.dim);
  const TensorView lse_view = token_heads(lse.get(), DType::f32, args.q.rows, args.q.heads);
  forward(forward_of(args, out_view, lse_view));
  args.out = out_view;
  args.lse = lse_view;
}

unsigned* zeroed_max_logit(StreamArray<unsigned>& to, const TensorView& max_logit, cudaStream_t stream) {
  if (!max_logit.given()) return nullptr;
  to = StreamArray<unsigned>(at(max_logit.heads), stream);
  WEFT_CUDA(cudaMemsetAsync(to.get(), 0, to.size() * sizeof(unsigned), stream));
  return to.get();
}

}  // namespace weft::cuda
