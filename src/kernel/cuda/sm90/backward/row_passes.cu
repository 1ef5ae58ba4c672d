// Memory-bound passes over rows before and after the backward kernel.
#include "cuda/launch.h"
#include "kernel/cuda/rows.cuh"
#include "kernel/cuda/sm90/backward/params.h"
#include "kernel/cuda/sm90/ptx/ptx.cuh"
#include "kernel/cuda/work/tile_iterators.cuh"

namespace weft::cuda::sm90 {
namespace {

constexpr int kThreads = 256;

// Rows of a tile; `held` if slices contain them.
struct TileRows {
  int begin, end;
  bool held;
  __device__ bool is_live(int row) const { return row < end && held; }
};
__device__ TileRows rows_of_tile(const QueryTiles& tiles, int tile) {
  const int2 range = tiles.ranges[tile];
  return {range.x, range.y < 0 ? ~range.y : range.y, range.y >= 0};
}

__device__ float2 two_floats(unsigned x, DType dtype) {  // bf16 or f16
  if (dtype == DType::bf16) return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
  return __half22float2(*reinterpret_cast<const __half2*>(&x));
}

// One order of additions for every input layout, so that a row's bits do not depend on its view.
__device__ float dot_two(float2 a, float2 b) { return __fmaf_rn(a.x, b.x, __fmul_rn(a.y, b.y)); }
__device__ float add_four_sums(float a, float b, float c, float d) {
  return __fadd_rn(__fadd_rn(a, b), __fadd_rn(c, d));
}

// The address of eight elements of 16 bits.
__device__ __forceinline__ const uint4* eight_at(const InputView& from, int row, int head, int piece) {
  return reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(from.view.data) +
                                        offset_of(from.view, row, head) + piece * 8);
}

__device__ __forceinline__ double sink_term(const PrepareParams& params, int head, bool live, float lse, float delta) {
  const float sink = sink_logit(params.sink, head);
  return live && sink != kMinusInfinity<float> ? -static_cast<double>(expf(sink - lse) * delta) : 0.0;
}

template <int kCount>
__device__ __forceinline__ void zero_fill_sums(float* sums) {
  float4* fours = reinterpret_cast<float4*>(sums);
#pragma unroll
  for (int i = 0; i < kCount / 4 / kThreads; ++i) fours[i * kThreads + static_cast<int>(threadIdx.x)] = {0, 0, 0, 0};
}

__device__ __forceinline__ double& sink_term_of_head(const PrepareParams& params, int unit, int tile, int head) {
  return params.dsink[static_cast<Index>((unit << params.rows.log2_heads) + head) * params.rows.tiles + tile];
}
// Each head's sum of a tile's terms, in the same order on every run.
template <int kRows>
__device__ __forceinline__ void sum_sink_terms(const PrepareParams& params, const double (&terms)[kRows], int unit,
                                               int tile) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread >= params.rows.heads()) return;
  double sum = 0;
  for (int r = thread; r < kRows; r += params.rows.heads()) sum += terms[r];
  sink_term_of_head(params, unit, tile, thread) = sum;
}

// Of tiles that there are not, only the sink's terms count, because they are added up.
__device__ __forceinline__ bool is_past_count(const PrepareParams& params, int unit, int tile) {
  if (tile < count_at(params.rows.count, params.rows.tiles)) return false;
  const int thread = static_cast<int>(threadIdx.x);
  if (params.dsink != nullptr && thread < params.rows.heads()) sink_term_of_head(params, unit, tile, thread) = 0;
  return true;
}

// One block per tile and unit; a row is read by as many lanes as it has pieces of 8 elements.
template <Width kWidth>
__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ PrepareParams params) {
  constexpr BackwardShape kShape = backward_shape(kWidth);
  constexpr int kRows = kShape.rows(), kLanes = kShape.dim_v / 8;
  __shared__ double sink_terms[kRows];
  griddepcontrol_launch_dependents();
  if (blockIdx.x == 0 && threadIdx.x == 0 && params.counter != nullptr) *params.counter = 0;
  if (params.rows.tiles == 0) return;
  // The first heads come last: the backward kernel starts with them and finds their sums in the L2 cache.
  const int block = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const int tile = block % params.rows.tiles, unit = block / params.rows.tiles;
  const int dim = static_cast<int>(params.dout.view.dim), thread = static_cast<int>(threadIdx.x);
  if (is_past_count(params, unit, tile)) return;
  const TileRows rows = rows_of_tile(params.rows, tile);
  float* statistics = params.statistics + static_cast<Index>(block) * (2 * kRows);
  constexpr int kParts = kShape.parts_of_tile();
  if (params.additions != nullptr && thread < kParts) params.additions[kParts * static_cast<Index>(block) + thread] = 0;
  constexpr int kStep = kThreads / kLanes, kEach = kRows / kStep;  // rows of a thread
  const int piece = thread % kLanes;
  const auto row_of = [&](int i) { return rows.begin + ((i * kStep + thread / kLanes) >> params.rows.log2_heads); };
  const auto head_of = [&](int i) {
    return (unit << params.rows.log2_heads) + ((i * kStep + thread / kLanes) & (params.rows.heads() - 1));
  };
  // Overlaps the loads of the tile's rows.
  constexpr int kSums = kRows * kShape.dim_qk;
  if (params.dq_sums != nullptr) zero_fill_sums<kSums>(params.dq_sums + static_cast<Index>(block) * kSums);
  bool live[kEach];
  float lse[kEach], delta[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    live[i] = rows.is_live(row_of(i));
    lse[i] = kMinusInfinity<float>;
    if (live[i] && piece == 0)
      lse[i] = load_element(params.lse.data, params.lse.dtype, offset_of(params.lse, row_of(i), head_of(i)));
    delta[i] = 0;
  }
  if (params.out.direct && params.out.same && params.dout.direct &&
      params.dout.same) {  // all loads are issued before the first use
    uint4 a[kEach], b[kEach];
    const auto at = [&](const InputView& from, int i) { return eight_at(from, row_of(i), head_of(i), piece); };
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      a[i] = b[i] = make_uint4(0, 0, 0, 0);
      if (live[i] && piece * 8 < dim) a[i] = __ldcs(at(params.out, i)), b[i] = *at(params.dout, i);
    }
    const auto both = [&](unsigned x, unsigned y) {
      return dot_two(two_floats(x, params.dout.view.dtype), two_floats(y, params.dout.view.dtype));
    };
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      delta[i] = add_four_sums(both(a[i].x, b[i].x), both(a[i].y, b[i].y), both(a[i].z, b[i].z), both(a[i].w, b[i].w));
  } else {
#pragma unroll 1
    for (int i = 0; i < kEach; ++i) {
      float a[8] = {}, b[8] = {};
      if (rows.is_live(row_of(i)) && piece * 8 < dim) {
        load_eight(params.out, offset_of(params.out.view, row_of(i), head_of(i)) + piece * 8, dim - piece * 8, a);
        load_eight(params.dout, offset_of(params.dout.view, row_of(i), head_of(i)) + piece * 8, dim - piece * 8, b);
      }
      const auto both = [&](int j) { return dot_two({a[j], a[j + 1]}, {b[j], b[j + 1]}); };
      const float sum = add_four_sums(both(0), both(2), both(4), both(6));
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (j == i) delta[j] = sum;
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int lane = kLanes / 2; lane > 0; lane /= 2) delta[i] += __shfl_xor_sync(0xffffffffu, delta[i], lane);
    if (piece != 0) continue;
    const int r = i * kStep + thread / kLanes;
    if (params.dsink != nullptr) sink_terms[r] = sink_term(params, head_of(i), live[i], lse[i], delta[i]);
    const bool keys = lse[i] != kMinusInfinity<float>;  // without keys P is 0, whatever the score
    statistics[statistics_at(r)] = keys ? lse[i] * kLog2E : -kMinusInfinity<float>;
    statistics[kRows + statistics_at(r)] = keys ? params.scale * delta[i] : 0.0f;
  }
  if (params.dsink == nullptr) return;
  __syncthreads();
  sum_sink_terms(params, sink_terms, unit, tile);
}

// One block per tile and unit. Sums are in register layout: 128 lanes of float4, for each 8 columns.
template <Width kWidth, class N>
__global__ void __launch_bounds__(kThreads) store_kernel(const __grid_constant__ StoreParams params) {
  constexpr BackwardShape kShape = backward_shape(kWidth);
  constexpr int kRows = kShape.rows(), kK = kShape.dim_qk, kPitch = kK + 8;
  __shared__ __align__(16) std::uint16_t rounded[kRows * kPitch];
  griddepcontrol_wait();
  // The last heads come first: their sums are still in the L2 cache.
  const int block = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const int tile = block % params.rows.tiles, unit = block / params.rows.tiles;
  if (tile >= count_at(params.rows.count, params.rows.tiles)) return;
  const TileRows rows = rows_of_tile(params.rows, tile);
  const float4* sums = reinterpret_cast<const float4*>(params.dq_sums + static_cast<Index>(block) * (kRows * kK));
  const int thread = static_cast<int>(threadIdx.x);
  const auto row_of = [&](int r) { return rows.begin + (r >> params.rows.log2_heads); };
  const auto head_of = [&](int r) { return (unit << params.rows.log2_heads) + (r & (params.rows.heads() - 1)); };
  static_assert(kThreads % 128 == 0);  // a thread's two rows are the same in every round
  bool seeing[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {  // not read from the statistics, which may alias dQ
    const int r = thread / 32 % 4 * 16 + thread % 32 / 4 + 8 * j;
    seeing[j] = rows.is_live(row_of(r)) &&
                load_element(params.lse.data, params.lse.dtype, offset_of(params.lse, row_of(r), head_of(r))) !=
                    kMinusInfinity<float>;
  }
#pragma unroll
  for (int i = 0; i < kRows * kK / 4 / kThreads; ++i) {
    const int e = i * kThreads + thread, lane = e % 32, eight = e / 128;
    const int column = eight * 8 + lane % 4 * 2;
    const float4 four = __ldcs(sums + e);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int r = e / 32 % 4 * 16 + lane / 4 + 8 * j;
      const float x = seeing[j] ? (j == 0 ? four.x : four.z) : 0.0f, y = seeing[j] ? (j == 0 ? four.y : four.w) : 0.0f;
      if (params.vec8) {
        unsigned one[1];
        N::pack(one, x, y);
        *reinterpret_cast<unsigned*>(rounded + r * kPitch + column) = one[0];
      } else {
        if (row_of(r) < rows.end) RowOut(params.dq, row_of(r), head_of(r)).store(column, x, y);
      }
    }
  }
  if (!params.vec8) return;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRows * kK / 8 / kThreads; ++i) {
    const int e = i * kThreads + thread, r = e / (kK / 8), column = e % (kK / 8) * 8;
    if (row_of(r) >= rows.end || column >= params.dq.dim) continue;
    const Index at = offset_of(params.dq, row_of(r), head_of(r)) + column;
    *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(params.dq.data) + at) =
        *reinterpret_cast<const uint4*>(rounded + r * kPitch + column);
  }
}

auto prepare_of(Width width) {
  return dispatch_width(width, [&]<Width kWidth>() { return &prepare_kernel<kWidth>; });
}
template <class N>
auto store_of(Width width) {
  return dispatch_width(width, [&]<Width kWidth>() { return &store_kernel<kWidth, N>; });
}

__global__ void __launch_bounds__(kThreads)
    round_kernel(const __grid_constant__ ConstTensorView from, DType dtype, void* to, Index width) {
  const Index count = from.rows * from.heads * width;
  for (Index i = Index{blockIdx.x} * kThreads + threadIdx.x; i < count; i += Index{gridDim.x} * kThreads) {
    const Index column = i % width, head = i / width % from.heads, row = i / width / from.heads;
    const Index at = offset_of(from, static_cast<int>(row), static_cast<int>(head)) + column;
    store_element(to, dtype, i, column < from.dim ? load_element(from.data, from.dtype, at) : 0.0f);
  }
}

}  // namespace

void prepare_rows(Width width, const PrepareParams& params, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(params.rows.tiles * (params.heads_q >> params.rows.log2_heads));
  if (blocks == 0 && params.counter == nullptr) return;
  launch(prepare_of(width), {dim3(blocks > 0 ? blocks : 1), dim3(kThreads), 0}, stream, params);
}

void store_rows(Width width, const StoreParams& params, DType inputs, cudaStream_t stream) {
  const unsigned blocks =
      static_cast<unsigned>(params.rows.tiles) * static_cast<unsigned>(params.dq.heads >> params.rows.log2_heads);
  launch(select_16bit(inputs, store_of<Bf16>(width), store_of<F16>(width)),
         {dim3(blocks), dim3(kThreads), 0, params.programmatic}, stream, params);
}

void round_to(const ConstTensorView& from, DType dtype, void* to, Index width, cudaStream_t stream) {
  const Index blocks = min_of(1024, ceil_div(from.rows * from.heads * width, kThreads));
  launch(&round_kernel, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0}, stream, from, dtype, to, width);
}

}  // namespace weft::cuda::sm90
