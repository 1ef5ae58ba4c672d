#include "cuda/launch.h"
#include "index.h"
#include "kernel/cuda/rows.cuh"
#include "kernel/cuda/sm90/aligned_copy.h"

namespace weft::cuda::sm90 {
namespace {

bool is_tma_aligned(const ConstTensorView& view) {
  const auto multiple = [](Index stride) { return stride % 8 == 0; };
  const bool even = view.inner == 0 || view.rows <= view.inner || view.outer_stride == view.inner * view.row_stride;
  return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && even &&
         (view.rows <= 1 || multiple(view.row_stride)) && (view.heads == 1 || multiple(view.head_stride));
}

__global__ void copy_rows(const __grid_constant__ ConstTensorView from, std::uint16_t* to, Index width) {
  const Index count = from.rows * from.heads * width;
  for (Index i = Index{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += Index{gridDim.x} * blockDim.x) {
    const Index column = i % width, head = i / width % from.heads, row = i / width / from.heads;
    if (column < from.dim)
      to[i] = static_cast<const std::uint16_t*>(
          from.data)[offset_of(from, static_cast<int>(row), static_cast<int>(head)) + column];
  }
}

__global__ void round_rows(const float* from, const __grid_constant__ TensorView to) {
  const Index count = to.rows * to.heads * to.dim;
  for (Index i = Index{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += Index{gridDim.x} * blockDim.x) {
    const Index column = i % to.dim, head = i / to.dim % to.heads, row = i / to.dim / to.heads;
    store_element(to.data, to.dtype, offset_of(to, static_cast<int>(row), static_cast<int>(head)) + column, from[i]);
  }
}

Shape shape_for(Index count) {
  constexpr Index kThreads = 256, kBlocks = 132 * 8;
  return {dim3(static_cast<unsigned>(min_of(kBlocks, ceil_div(count, kThreads)))), dim3(kThreads)};
}

}  // namespace

AlignedInput::AlignedInput(const ConstTensorView& view, cudaStream_t stream) : view_(view) {
  if (view.rows == 0 || is_tma_aligned(view)) return;
  const Index width = ceil_div(view.dim, 8) * 8, count = view.rows * view.heads * width;
  copy_ = StreamArray<std::uint16_t>(at(count), stream);
  launch(copy_rows, shape_for(count), stream, view, copy_.get(), width);
  view_ = thd(copy_.get(), view.dtype, view.rows, view.heads, width);
  view_.dim = view.dim;
}

bool stores_vec8(const TensorView& view, DType dtype) {
  const auto multiple = [](Index stride) { return stride % 8 == 0; };
  return view.dtype == dtype && reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && multiple(view.dim) &&
         multiple(view.row_stride) && multiple(view.head_stride) && (view.inner == 0 || multiple(view.outer_stride));
}

AlignedOutput::AlignedOutput(const TensorView& view, DType inputs, cudaStream_t stream)
    : vec8_(stores_vec8(view, inputs)), asked_(view), view_(view), stream_(stream) {
  if (!view.given() || view.rows == 0 || vec8_ || view.dtype == DType::f32) return;
  aside_ = StreamArray<float>(at(view.rows * view.heads * view.dim), stream);
  view_ = thd(aside_.get(), DType::f32, view.rows, view.heads, view.dim);
}

void AlignedOutput::finish() const {
  if (aside_.size() > 0)
    launch(round_rows, shape_for(static_cast<Index>(aside_.size())), stream_, aside_.get(), asked_);
}

}  // namespace weft::cuda::sm90
