// Rows of tensor views in global memory: loads into tiles, and stores from registers.
#pragma once

#include "kernel/cuda/portable/params.h"
#include "kernel/cuda/portable/tile.cuh"
#include "weft/tensor.h"

namespace weft::cuda {

// Row indices are 32-bit, which makes the division cheap; element offsets are 64-bit.
template <class Void>
__device__ inline Index offset_of(const BasicTensorView<Void>& view, int row, int head) {
  const Index from_head = head * view.head_stride;
  if (view.inner == 0) return from_head + row * view.row_stride;
  const unsigned inner = static_cast<unsigned>(view.inner), r = static_cast<unsigned>(row);
  return from_head + static_cast<Index>(r / inner) * view.outer_stride +
         static_cast<Index>(r % inner) * view.row_stride;
}

__device__ inline float load_element(const void* data, DType dtype, Index at) {
  switch (dtype) {
    case DType::f32:
      return static_cast<const float*>(data)[at];
    case DType::bf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]);
    case DType::f16:
      return __half2float(static_cast<const __half*>(data)[at]);
    default:  // f64; 8-bit floats were refused. Listing all cases changes the register allocation of kernels that
              // inline this.
      return static_cast<float>(static_cast<const double*>(data)[at]);
  }
}
__device__ inline void store_element(void* data, DType dtype, Index at, float x) {
  switch (dtype) {
    case DType::f32:
      static_cast<float*>(data)[at] = x;
      break;
    case DType::bf16:
      static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16_rn(x);
      break;
    case DType::f16:
      static_cast<__half*>(data)[at] = __float2half_rn(x);
      break;
    default:  // f64, as above
      static_cast<double*>(data)[at] = static_cast<double>(x);
  }
}

// Eight elements from `at` on, zeros past `count`; loads of 16 bytes where they are aligned.
__device__ inline void load_eight(const InputView& from, Index at, int count, float (&x)[8]) {
  if (from.direct && count >= 8) {
    const void* data = from.view.data;
    if (from.view.dtype == DType::f32) {
      const float4* four = reinterpret_cast<const float4*>(static_cast<const float*>(data) + at);
      const float4 a = four[0], b = four[1];
      x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
      return;
    }
    const uint4 all = *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(data) + at);
    const unsigned pairs[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint16_t low = static_cast<std::uint16_t>(pairs[i]), high = static_cast<std::uint16_t>(pairs[i] >> 16);
      const bool b = from.view.dtype == DType::bf16;
      x[2 * i] = b ? __bfloat162float(__ushort_as_bfloat16(low)) : __half2float(__ushort_as_half(low));
      x[2 * i + 1] = b ? __bfloat162float(__ushort_as_bfloat16(high)) : __half2float(__ushort_as_half(high));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = i < count ? load_element(from.view.data, from.view.dtype, at + i) : 0.0f;
}

template <class N>
__device__ inline void load_piece(const InputView& from, Index at, int count, unsigned (&to)[N::kParts][4]) {
  float x[8];
  load_eight(from, at, count, x);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unsigned packed[N::kParts];
    N::pack(packed, x[2 * i], x[2 * i + 1]);
#pragma unroll
    for (int part = 0; part < N::kParts; ++part) to[part][i] = packed[part];
  }
}

// Asynchronous copies of rows first .. first + kRows, kPieces pieces of each from kFirst on; a thread's rows are
// equally spaced. Pieces that are not valid, or past the view's columns, become zeros and are not read.
template <class Layout, int kRows, int kFirst, int kPieces, int kThreads, class Valid>
__device__ inline void copy_columns(unsigned to, const ConstTensorView& from, int first, int head, const Valid& valid) {
  constexpr int kStep = kThreads / kPieces;
  static_assert(kThreads % kPieces == 0 && kRows % kStep == 0);
  const int r = static_cast<int>(threadIdx.x) / kPieces, piece = kFirst + static_cast<int>(threadIdx.x) % kPieces;
  const bool inside = piece * 8 < static_cast<int>(from.dim);
  const char* at = static_cast<const char*>(from.data) + 2 * (offset_of(from, first + r, head) + piece * 8);
  const Index apart = 2 * kStep * from.row_stride;
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i, at += apart)
    cp_async_16(to + Layout::offset(r + i * kStep, piece), at, !(inside && valid(r + i * kStep)));
}

// Rows first .. first + kRows of a head. Rows that are not valid(r), and columns past the view's, become zeros and are
// not read. Asynchronous where possible: call cp_async_wait_all() and a barrier before the tile is used.
template <class N, int kRows, int kColumns, int kThreads, class Layout = SwizzledRows<kColumns>, class Valid>
__device__ inline void load_tile(unsigned to, const InputView& from, int first, int head, const Valid& valid) {
  constexpr int kPieces = kColumns / 8, kAll = kRows * kPieces;
  const int dim = static_cast<int>(from.view.dim);
  if (!N::kF32 && from.direct && from.same) {
    if constexpr (kThreads % kPieces == 0 && kAll % kThreads == 0) {
      if (from.view.inner == 0)
        return copy_columns<Layout, kRows, 0, kPieces, kThreads>(to, from.view, first, head, valid);
    } else if constexpr (kPieces == 72 && kThreads == 256 && kRows % 32 == 0) {
      if (from.view.inner == 0) {
        copy_columns<Layout, kRows, 0, 64, kThreads>(to, from.view, first, head, valid);
        return copy_columns<Layout, kRows, 64, 8, kThreads>(to, from.view, first, head, valid);
      }
    }
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < kAll; i += kThreads) {
      const int r = i / kPieces, piece = i % kPieces;
      const bool zero = !valid(r) || piece * 8 >= dim;
      const Index at = zero ? 0 : offset_of(from.view, first + r, head) + piece * 8;
      cp_async_16(to + Layout::offset(r, piece), static_cast<const std::uint16_t*>(from.view.data) + at, zero);
    }
    return;
  }
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kAll; i += kThreads) {
    const int r = i / kPieces, piece = i % kPieces;
    unsigned parts[N::kParts][4] = {};
    if (valid(r) && piece * 8 < dim)
      load_piece<N>(from, offset_of(from.view, first + r, head) + piece * 8, dim - piece * 8, parts);
#pragma unroll
    for (int part = 0; part < N::kParts; ++part)
      asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"r"(
                       to + static_cast<unsigned>(part * kRows * kColumns * 2) + Layout::offset(r, piece)),
                   "r"(parts[part][0]), "r"(parts[part][1]), "r"(parts[part][2]), "r"(parts[part][3])
                   : "memory");
  }
}

// A row of an output, written two columns at a time.
struct RowOut {
  void* data;
  DType dtype;
  Index at;
  int dim;
  bool pairs;  // two elements can be stored as one
  __device__ RowOut(const TensorView& view, int row, int head)
      : data(view.data), dtype(view.dtype), at(offset_of(view, row, head)), dim(static_cast<int>(view.dim)) {
    pairs = (reinterpret_cast<std::uintptr_t>(data) / static_cast<unsigned>(size_of(dtype)) +
             static_cast<unsigned long long>(at)) %
                2 ==
            0;
  }
  __device__ void store(int column, float x, float y) const {
    if (column + 1 < dim && pairs) {
      if (dtype == DType::bf16) {
        *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(data) + at + column) =
            __floats2bfloat162_rn(x, y);
        return;
      }
      if (dtype == DType::f16) {
        *reinterpret_cast<__half2*>(static_cast<__half*>(data) + at + column) = __floats2half2_rn(x, y);
        return;
      }
      if (dtype == DType::f32) {
        *reinterpret_cast<float2*>(static_cast<float*>(data) + at + column) = make_float2(x, y);
        return;
      }
    }
    if (column < dim) store_element(data, dtype, at + column, x);
    if (column + 1 < dim) store_element(data, dtype, at + column + 1, y);
  }
  __device__ void add(int column, float x, float y) const {  // into f32
    float* to = static_cast<float*>(data) + at;
    if (column < dim) to[column] += x;
    if (column + 1 < dim) to[column + 1] += y;
  }
};

inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kLn2 = 0.69314718055994531f;

// Maps floats to integers of the same order, with NaN above all.
__device__ inline unsigned ordered(float x) {
  if (isnan(x)) return 0xffffffffu;
  const unsigned bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline float sink_logit(const SinkLogits& sink, int head) {
  if (!sink.given) return kMinusInfinity<float>;
  if (sink.logits.data == nullptr) return 0;
  return load_element(sink.logits.data, sink.logits.dtype, head * sink.logits.head_stride);
}

}  // namespace weft::cuda
