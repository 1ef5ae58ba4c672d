// The end of QuerySteps for rows that have no keys in the last call: their saved sums become out and lse.
#include "cuda/launch.h"
#include "kernel/cuda/rows.cuh"
#include "kernel/cuda/sm90/forward/key_steps.cuh"
#include "kernel/cuda/sm90/forward/params.h"
#include "kernel/cuda/sm90/fragments.cuh"

namespace weft::cuda::sm90 {
namespace {

// One block per tile and unit, with the warps and lanes of the consumers.
template <class N, Width kWidth>
__global__ void __launch_bounds__(128 * forward_shape(kWidth).consumers)
    finish_rows_kernel(const __grid_constant__ ForwardParams params) {
  constexpr ForwardShape kShape = forward_shape(kWidth);
  const ForwardItem item = item_of(params, static_cast<int>(blockIdx.x) % params.tiles);
  if (item.first < item.last) return;
  const int unit = static_cast<int>(blockIdx.x) / params.tiles;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x % 32);
  const Index first = params.steps.block(unit, item.tile, params.tiles) * kShape.rows() + 16 * warp;
  RowState<float> states[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // past the tile's last row nothing may have been saved
    const int m = lane / 4 + 8 * i;
    states[i] =
        item.begin + (16 * warp + m) / params.heads < item.end ? params.steps.states[first + m] : finished_row();
  }
  if (__all_sync(0xffffffffu, is_finished(states[0]) && is_finished(states[1]))) return;
  // A tile without keys in any call, or whose rows all ended in the first call that had keys, has no saved sums.
  const auto has_sums = [](const RowState<float>& state) { return !is_empty(state) && !is_finished(state); };
  const bool saved = has_sums(states[0]) || has_sums(states[1]);
  float o[kShape.dim_v / 2];
#pragma unroll
  for (int n = 0; n < kShape.dim_v / 8; ++n) {
    const float4* from = reinterpret_cast<const float4*>(params.steps.sums + first * kShape.dim_v + 128 * n + 4 * lane);
    const float4 x = saved ? *from : float4{};
    o[4 * n] = x.x, o[4 * n + 1] = x.y, o[4 * n + 2] = x.z, o[4 * n + 3] = x.w;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int m = 16 * warp + lane / 4 + 8 * i, row = item.begin + m / params.heads,
              head = unit * params.heads + m % params.heads;
    const bool valid = row < item.end && !is_finished(states[i]);
    RowState<float> state = valid ? states[i] : RowState<float>{};
    const bool seen = !is_empty(state);
    state.max *= kLn2;
    const FinishedRow<float> done = valid ? finish(state, sink_logit(params.sink, head)) : FinishedRow<float>{};
    if (valid && lane % 4 == 0 && params.lse.given())
      store_element(params.lse.data, params.lse.dtype, offset_of(params.lse, row, head), done.lse);
    const auto value = [&](int n, int j) { return seen ? fmaf(o[4 * n + 2 * i + j], done.weight, 0.0f) : 0.0f; };
    if (!params.vec8_out) {
      if (!valid) continue;
      const RowOut to(params.out, row, head);
#pragma unroll
      for (int n = 0; n < kShape.dim_v / 8; ++n) to.store(8 * n + 2 * (lane % 4), value(n, 0), value(n, 1));
      continue;
    }
    std::uint16_t* to = static_cast<std::uint16_t*>(params.out.data) + (valid ? offset_of(params.out, row, head) : 0);
    store_row_vec8<N, kShape.dim_v>(to, valid, 0, params.out.dim, value);
  }
}

template <class N, Width kWidth>
void launch_finish_rows(const ForwardParams& params, cudaStream_t stream) {
  launch(&finish_rows_kernel<N, kWidth>,
         {dim3(static_cast<unsigned>(params.tiles * params.units)), dim3(128 * forward_shape(kWidth).consumers), 0},
         stream, params);
}
template <class N>
void launch_finish_rows_any(Width width, const ForwardParams& params, cudaStream_t stream) {
  dispatch_width(width, [&]<Width kWidth>() { launch_finish_rows<N, kWidth>(params, stream); });
}

}  // namespace

void finish_steps(Width width, const ForwardParams& params, DType dtype, cudaStream_t stream) {
  select_16bit(dtype, &launch_finish_rows_any<Bf16>, &launch_finish_rows_any<F16>)(width, params, stream);
}

}  // namespace weft::cuda::sm90
