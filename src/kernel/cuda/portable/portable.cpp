#include <cmath>

#include "cuda/handle_pool.h"
#include "cuda/runtime.h"
#include "index.h"
#include "kernel/cuda/host.h"
#include "kernel/cuda/portable/params.h"
#include "kernel/cuda/work/list.h"
#include "kernel/cuda_kernels.h"
#include "text.h"

namespace weft::cuda {
namespace {

constexpr Index kRowMultiple = 64;  // a multiple of every query tile of the backward

// Rows of a tile of queries for dQ, and of keys for dK and dV, and whether blocks have large shared memory.
struct BackwardTiles {
  int rows, keys;
  bool large_shared;
};
BackwardTiles backward_tiles(bool f32, Width width, Index shared_bytes) {
  if (width == Width::w576_512) {
    const int rows = wide_gradient_rows(f32);
    return {rows, rows, shared_bytes >= wide_gradient_shared(f32, true)};
  }
  const bool large_shared = shared_bytes >= backward_shared(f32, width, true);
  return {dq_rows(f32, dq_width(width)), backward_shape(f32, width, large_shared).keys, large_shared};
}

}  // namespace

GpuProperties gpu_properties(int device) {
  const auto ask = [&](int& to, cudaDeviceAttr what) { return cudaDeviceGetAttribute(&to, what, device); };
  GpuProperties gpu;
  int shared = 0;
  cudaError_t result = ask(gpu.major, cudaDevAttrComputeCapabilityMajor);
  if (result == cudaSuccess) result = ask(gpu.minor, cudaDevAttrComputeCapabilityMinor);
  if (result == cudaSuccess) result = ask(shared, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (result != cudaSuccess) {
    clear_last_error(result);  // the attribute was only a question
    int devices = 0;
    const cudaError_t counted = cudaGetDeviceCount(&devices);
    clear_last_error(counted);
    // A GPU that exists but does not answer is an error, not a GPU without the feature, which would mean another
    // kernel.
    if (counted == cudaSuccess && device < devices) check(result, "cudaDeviceGetAttribute");
    gpu.missing = cudaGetErrorString(result);
  }
  gpu.shared_bytes = shared;
  return gpu;
}

void forward_by_head(const KernelForwardArgs& args, int tile_rows,
                     const std::function<void(const ForwardParams&, cudaStream_t)>& run) {
  const DeviceGuard on(args.place.device);
  const cudaStream_t stream = stream_of(args.place);
  check_rows(max_of(args.q.rows, args.k.rows));
  const DType dtype = args.q.dtype;
  const Tiling rows[] = {{Side::query, args.q.rows, tile_rows}};
  check_grid(rows[0].tiles(), args.q.heads);
  const WorkLists work = make_work_lists(args.slices, args.device_plan, rows,
                                         {args.q.heads, args.k.heads, args.attention.head_map}, stream);

  // The largest score must be the largest logit: a negative scale changes the queries' sign, and a scale of 0 zeroes
  // them.
  const double scale = scale_of(args.attention, args.q.dim);
  const double size = scale == 0 ? 1 : std::abs(scale);
  StreamArray<unsigned> ordered_max;
  const ForwardParams params{.q = input_view(args.q, dtype),
                             .k = input_view(args.k, dtype),
                             .v = input_view(args.v, dtype),
                             .list = work.lists[0],
                             .heads = work.heads,
                             .scores = score_scale_of(size, args.attention.softcap),
                             .sign = sign_of(scale),
                             .sink = sink_of(args.attention.sink),
                             .out = args.out,
                             .lse = args.lse,
                             .partial = args.partial,
                             .max_logit = zeroed_max_logit(ordered_max, args.max_logit, stream),
                             .tiles = rows[0].tiles(),
                             .heads_q = static_cast<int>(args.q.heads)};
  run(params, stream);
  if (params.max_logit != nullptr) store_max_logit(params.max_logit, args.max_logit, stream);
}

void portable_forward(const KernelForwardArgs& args) {
  const DType dtype = args.q.dtype;
  const bool f32 = dtype == DType::f32;
  const Width width = width_of(dtype, args.q.dim, args.v.dim);
  if (width == Width::w576_512) {
    const bool large_shared = gpu_properties(args.place.device).shared_bytes >= wide_forward_shared(f32, true);
    return forward_by_head(args, wide_forward_shape(f32, large_shared).rows, [&](const auto& params, auto stream) {
      select_dtype(dtype, &run_wide_forward<Bf16>, &run_wide_forward<F16>, &run_wide_forward<F32>)(large_shared, params,
                                                                                                   stream);
    });
  }
  forward_by_head(args, forward_rows(f32, width), [&](const auto& params, auto stream) {
    select_dtype(dtype, &run_forward<Bf16>, &run_forward<F16>, &run_forward<F32>)(width, params, stream);
  });
}

void portable_backward(const KernelBackwardArgs& given) {
  const DeviceGuard on(given.place.device);
  const cudaStream_t stream = stream_of(given.place);
  KernelBackwardArgs args = given;
  check_rows(max_of(args.q.rows, args.k.rows));
  const RecomputedForward recomputed(args, &portable_forward, stream);
  const DType dtype = args.q.dtype;
  const bool f32 = dtype == DType::f32;
  const Width width = width_of(dtype, args.q.dim, args.v.dim);
  const bool wide = width == Width::w576_512;
  const BackwardTiles tiles = backward_tiles(f32, width, gpu_properties(given.place.device).shared_bytes);
  const Tiling tilings[] = {{Side::query, args.q.rows, tiles.rows}, {Side::key, args.k.rows, tiles.keys}};
  const int row_tiles = tilings[0].tiles(), key_tiles = tilings[1].tiles();
  check_grid(max_of(row_tiles, key_tiles), max_of(args.q.heads, args.k.heads));
  const WorkLists work = make_work_lists(args.slices, args.device_plan, tilings,
                                         {args.q.heads, args.k.heads, args.attention.head_map}, stream);

  const Index padded = ceil_div(args.q.rows, kRowMultiple) * kRowMultiple;
  const std::size_t heads_q = at(args.q.heads);
  const StreamArray<float2> statistics(at(padded) * heads_q, stream);
  const StreamArray<double> dsink(args.dsink.given() ? at(row_tiles) * heads_q : 0, stream);
  // Tiles of fewer rows than kRowMultiple may end before the padding does.
  if (padded > 0) WEFT_CUDA(cudaMemsetAsync(statistics.get(), 0, statistics.size() * sizeof(float2), stream));
  row_statistics({.out = input_view(args.out, dtype),
                  .dout = input_view(args.dout, dtype),
                  .lse = args.lse,
                  .list = work.lists[0],
                  .sink = sink_of(args.attention.sink),
                  .statistics = statistics.get(),
                  .dsink = dsink.get(),
                  .rows = tiles.rows,
                  .padded_rows = static_cast<int>(padded),
                  .tiles = row_tiles,
                  .heads_q = static_cast<int>(args.q.heads)},
                 stream);
  if (args.dsink.given()) sum_dsink(dsink.get(), row_tiles, args.dsink, stream);

  StreamArray<float> dq_sums;
  if (!args.deterministic && !wide) {
    dq_sums = StreamArray<float>(statistics.size() * at(columns_k(width)), stream);
    if (dq_sums.size() > 0) WEFT_CUDA(cudaMemsetAsync(dq_sums.get(), 0, dq_sums.size() * sizeof(float), stream));
  }
  const double scale = scale_of(args.attention, args.q.dim);
  const BackwardParams params{.q = input_view(args.q, dtype),
                              .k = input_view(args.k, dtype),
                              .v = input_view(args.v, dtype),
                              .dout = input_view(args.dout, dtype),
                              .rows = work.lists[0],
                              .keys = work.lists[1],
                              .heads = work.heads,
                              .scores = score_scale_of(scale, args.attention.softcap),
                              .scale = static_cast<float>(scale),
                              .statistics = statistics.get(),
                              .padded_rows = static_cast<int>(padded),
                              .dq_sums = dq_sums.get(),
                              .dq = args.dq,
                              .dk = args.dk,
                              .dv = args.dv,
                              .add_keys = args.add_keys,
                              .large_shared = tiles.large_shared,
                              .row_tiles = row_tiles,
                              .key_tiles = key_tiles,
                              .heads_q = static_cast<int>(args.q.heads),
                              .heads_k = static_cast<int>(args.k.heads)};
  if (wide)
    return select_dtype(dtype, &run_wide_backward<Bf16>, &run_wide_backward<F16>, &run_wide_backward<F32>)(params,
                                                                                                           stream);
  const auto run = [&](auto bf16, auto f16, auto f32_) { select_dtype(dtype, bf16, f16, f32_)(width, params, stream); };
  run(&run_backward<Bf16>, &run_backward<F16>, &run_backward<F32>);
  if (args.deterministic)
    run(&run_dq<Bf16>, &run_dq<F16>, &run_dq<F32>);
  else
    store_dq(params, f32, width, stream);
}

void finish_partial(const FinishArgs& args) {
  const DeviceGuard on(args.place.device);
  const cudaStream_t stream = stream_of(args.place);
  StreamArray<unsigned> ordered_max;
  unsigned* const max_logit = zeroed_max_logit(ordered_max, args.max_logit, stream);
  finish_rows({args.partial, sink_of(args.sink), args.out, args.lse, max_logit}, stream);
  if (max_logit != nullptr) store_max_logit(max_logit, args.max_logit, stream);
}

}  // namespace weft::cuda
