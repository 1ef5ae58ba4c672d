// The end of QuerySteps for rows that see nothing in the last call: sums that earlier calls left become out and lse.
#include "cuda/launch.h"
#include "kernel/cuda/rows.cuh"
#include "kernel/cuda/sm90/call.h"
#include "kernel/cuda/sm90/forward/key_steps.cuh"
#include "kernel/cuda/sm90/fragments.cuh"

namespace weft::cuda::sm90 {
namespace {

// A block a tile and unit, its warps and lanes as those of the math.
template <class N, Width kWidth>
__global__ void __launch_bounds__(128 * forward_shape(kWidth).groups)
    rest_kernel(const __grid_constant__ ForwardCall call) {
  constexpr ForwardShape kShape = forward_shape(kWidth);
  const ForwardItem item = item_of(call, static_cast<int>(blockIdx.x) % call.tiles);
  if (item.first < item.last) return;
  const int unit = static_cast<int>(blockIdx.x) / call.tiles;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x % 32);
  const Index first = call.steps.block(unit, item.tile, call.tiles) * kShape.rows() + 16 * warp;
  RowState<float> states[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // behind the tile's last row nothing may have been left
    const int m = lane / 4 + 8 * i;
    states[i] = item.begin + (16 * warp + m) / call.heads < item.end ? call.steps.states[first + m] : ended_row();
  }
  if (__all_sync(0xffffffffu, has_ended(states[0]) && has_ended(states[1]))) return;
  // Of a tile that no call has seen, or whose rows ended in the first that did, there are no sums.
  const auto has_sums = [](const RowState<float>& state) { return !is_empty(state) && !has_ended(state); };
  const bool kept = has_sums(states[0]) || has_sums(states[1]);
  float o[kShape.v / 2];
#pragma unroll
  for (int n = 0; n < kShape.v / 8; ++n) {
    const float4* from = reinterpret_cast<const float4*>(call.steps.sums + first * kShape.v + 128 * n + 4 * lane);
    const float4 x = kept ? *from : float4{};
    o[4 * n] = x.x, o[4 * n + 1] = x.y, o[4 * n + 2] = x.z, o[4 * n + 3] = x.w;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int m = 16 * warp + lane / 4 + 8 * i, row = item.begin + m / call.heads,
              head = unit * call.heads + m % call.heads;
    const bool valid = row < item.end && !has_ended(states[i]);
    RowState<float> state = valid ? states[i] : RowState<float>{};
    const bool seen = !is_empty(state);
    state.max *= kLn2;
    const FinishedRow<float> done = valid ? finish(state, sink_logit(call.sink, head)) : FinishedRow<float>{};
    if (valid && lane % 4 == 0 && call.lse.given())
      store_element(call.lse.data, call.lse.dtype, offset_of(call.lse, row, head), done.lse);
    const auto value = [&](int n, int j) { return seen ? fmaf(o[4 * n + 2 * i + j], done.weight, 0.0f) : 0.0f; };
    if (!call.wide_out) {
      if (!valid) continue;
      const RowOut to(call.out, row, head);
#pragma unroll
      for (int n = 0; n < kShape.v / 8; ++n) to.store(8 * n + 2 * (lane % 4), value(n, 0), value(n, 1));
      continue;
    }
    std::uint16_t* to = static_cast<std::uint16_t*>(call.out.data) + (valid ? offset_of(call.out, row, head) : 0);
    store_eights<N, kShape.v>(to, valid, 0, call.out.dim, value);
  }
}

template <class N, Width kWidth>
void launch_rest(const ForwardCall& call, cudaStream_t stream) {
  launch(&rest_kernel<N, kWidth>,
         {dim3(static_cast<unsigned>(call.tiles * call.units)), dim3(128 * forward_shape(kWidth).groups), 0}, stream,
         call);
}
template <class N>
void launch_any_rest(Width width, const ForwardCall& call, cudaStream_t stream) {
  switch (width) {
    case Width::w64:
      return launch_rest<N, Width::w64>(call, stream);
    case Width::w128:
      return launch_rest<N, Width::w128>(call, stream);
    case Width::w192_128:
      return launch_rest<N, Width::w192_128>(call, stream);
    default:
      return launch_rest<N, Width::w256>(call, stream);
  }
}

}  // namespace

void finish_steps(Width width, const ForwardCall& call, DType dtype, cudaStream_t stream) {
  of_16_bits(dtype, &launch_any_rest<Bf16>, &launch_any_rest<F16>)(width, call, stream);
}

}  // namespace weft::cuda::sm90
