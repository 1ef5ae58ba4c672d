// Rounds f32 to a narrower type, once; f64 takes the numbers as they are.
#include <array>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/launch.h"
#include "cuda/runtime.h"
#include "index.h"
#include "plan/cuda/context.h"
#include "plan/cuda/divide.h"
#include "rows/round.h"
#include "text.h"
#include "weft/device_rows.h"

namespace weft {
namespace {

__device__ float widen(float x) { return x; }
__device__ float widen(double x) { return static_cast<float>(x); }
__device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float widen(__half x) { return __half2float(x); }
template <class T>
__device__ T narrow(float x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
  if constexpr (std::is_same_v<T, __half>) return __float2half_rn(x);
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) return x;
}

template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  T v[kWidth];
};

struct Round {
  ConstTensorView from;
  TensorView to;
  FastDivisor per_row, per_head;  // vectors per row and per head
  Index vectors;                  // in all
};
struct Rounds {
  Round tensor[2];  // blockIdx.y selects one
  bool accumulate;
};

// Four vectors per thread, a block's width apart. Rows are 64-bit, because a tensor may have more than 2^31 vectors.
template <class T, int kWidth>
__global__ void __launch_bounds__(256) round_vectors(const __grid_constant__ Rounds rounds) {
  const Round& r = rounds.tensor[blockIdx.y];
  constexpr int kBatch = 4, kQuad = kWidth < 4 ? kWidth : 4;
  using Quad = Vector<float, kQuad>;  // no load is wider than 16 bytes
  struct Floats {
    Quad q[kWidth / kQuad];
  };
  const Index first = static_cast<Index>(blockIdx.x) * 256 * kBatch;
  const Index first_row = first / r.per_row.divisor;
  const unsigned skipped = static_cast<unsigned>(first - first_row * r.per_row.divisor);
  Floats in[kBatch];
  Vector<T, kWidth>* to[kBatch];
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const unsigned x = skipped + threadIdx.x + 256 * j;
    to[j] = nullptr;
    if (first + threadIdx.x + 256 * j >= r.vectors) continue;
    const unsigned rows = r.per_row.divide(x), in_row = x - rows * r.per_row.divisor;
    const unsigned head = r.per_head.divide(in_row), at = (in_row - head * r.per_head.divisor) * kWidth;
    const Index row = first_row + rows;
    in[j] = *reinterpret_cast<const Floats*>(r.from.at<float>(row, head) + at);
    to[j] = reinterpret_cast<Vector<T, kWidth>*>(r.to.at<T>(row, head) + at);
  }
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    if (to[j] == nullptr) continue;
    Vector<T, kWidth> out;
    if (rounds.accumulate) out = *to[j];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float x = in[j].q[i / kQuad].v[i % kQuad];
      out.v[i] = narrow<T>(rounds.accumulate ? widen(out.v[i]) + x : x);
    }
    *to[j] = out;
  }
}

// Heads that are contiguous in both tensors become one long head.
Rounding join_heads(Rounding r) {
  if (r.from.head_stride != r.from.dim || r.to.head_stride != r.to.dim) return r;
  r.from.dim = r.to.dim = r.from.dim * r.from.heads;
  r.from.heads = r.to.heads = 1;
  return r;
}

// The most elements of a vector for which all accesses are aligned.
int width_of(const Rounding& r) {
  unsigned long long bits = 8;
  bits |= static_cast<unsigned long long>(r.from.dim);
  for (const ConstTensorView& t : {r.from, ConstTensorView(r.to)})
    bits |= static_cast<unsigned long long>(t.row_stride) | static_cast<unsigned long long>(t.head_stride) |
            static_cast<unsigned long long>(t.outer_stride) |
            reinterpret_cast<std::uintptr_t>(t.data) / static_cast<std::uintptr_t>(size_of(t.dtype));
  const int width = static_cast<int>(bits & ~(bits - 1));
  return min_of(width, static_cast<int>(16 / size_of(r.to.dtype)));  // no store is wider than 16 bytes
}

template <class T, int kWidth>
void launch_round(const Rounding& a, const Rounding& b, int count, bool accumulate, cudaStream_t stream) {
  const auto round = [](const Rounding& r) {
    const Index per_head = r.from.dim / kWidth, per_row = per_head * r.from.heads;
    return Round{r.from, r.to, FastDivisor(static_cast<unsigned>(per_row)),
                 FastDivisor(static_cast<unsigned>(per_head)), per_row * r.from.rows};
  };
  const Rounds rounds{{round(a), round(b)}, accumulate};
  const Index vectors = max_of(rounds.tensor[0].vectors, rounds.tensor[1].vectors);
  cuda::launch(round_vectors<T, kWidth>,
               {.blocks = dim3(static_cast<unsigned>(ceil_div(vectors, 1024)), static_cast<unsigned>(count)),
                .threads = dim3(256)},
               stream, rounds);
}

template <class T>
void launch_type(const Rounding& a, const Rounding& b, int count, bool accumulate, cudaStream_t stream) {
  switch (min_of(width_of(a), width_of(b))) {
    case 8:
      if constexpr (sizeof(T) == 2) return launch_round<T, 8>(a, b, count, accumulate, stream);
      [[fallthrough]];
    case 4:
      return launch_round<T, 4>(a, b, count, accumulate, stream);
    case 2:
      return launch_round<T, 2>(a, b, count, accumulate, stream);
    default:
      return launch_round<T, 1>(a, b, count, accumulate, stream);
  }
}

// One launch for both; the second may be the first again, with count 1.
void launch_pair(const Rounding& a, const Rounding& b, int count, bool accumulate, cudaStream_t stream) {
  switch (a.to.dtype) {
    case DType::f32:
      return launch_type<float>(a, b, count, accumulate, stream);
    case DType::bf16:
      return launch_type<__nv_bfloat16>(a, b, count, accumulate, stream);
    case DType::f16:
      return launch_type<__half>(a, b, count, accumulate, stream);
    case DType::f64:
      return launch_type<double>(a, b, count, accumulate, stream);
    case DType::f8_e4m3:
    case DType::f8_e5m2:
      break;  // callers have refused them
  }
}

}  // namespace

void round_on_device(const Place& place, const Rounding& first, const Rounding* second) {
  const cuda::DeviceGuard on(place.device);
  const auto stream = static_cast<cudaStream_t>(place.stream);
  const auto is_empty = [](const Rounding& r) { return r.to.rows == 0 || r.to.heads == 0 || r.to.dim == 0; };
  if (second != nullptr && !is_empty(first) && !is_empty(*second) && first.to.dtype == second->to.dtype)
    return launch_pair(join_heads(first), join_heads(*second), 2, false, stream);
  for (const Rounding* r : {&first, second})
    if (r != nullptr && !is_empty(*r)) launch_pair(join_heads(*r), join_heads(*r), 1, false, stream);
}

void round_rows(DeviceContext& context, const ConstTensorView& from, const TensorView& to, bool accumulate) {
  context.data().enter();
  constexpr std::array<DType, 1> kFrom{DType::f32};
  constexpr std::array<DType, 3> kTo{DType::f32, DType::bf16, DType::f16};
  check_tensor(from, {.name = "from", .dtypes = kFrom});
  check_tensor(to,
               {.name = "to", .rows = from.rows, .heads = from.heads, .dim = from.dim, .dtypes = kTo, .output = true});
  if (from.heads > kMaxTokens / from.dim)
    throw Error(text("rows of ", from.heads, " heads of ", from.dim, " are too long"), "give shorter rows");
  if (from.rows == 0) return;
  const Rounding rounding = join_heads({from, to});
  launch_pair(rounding, rounding, 1, accumulate, context.data().stream());
}

}  // namespace weft
