// The three input types as tensor core operands. An f32 is split into three bf16 (8 of its 24 bits each): six products
// of these make one of f32, and what is left out is below 2^-24 of it.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace weft::cuda {

__device__ inline void mma_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void mma_f16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// pack(parts, x, y) puts x in the low half.
struct Bf16 {
  static constexpr int kParts = 1;
  static constexpr bool kF32 = false;
  __device__ static void pack(unsigned (&to)[1], float x, float y) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
    to[0] = *reinterpret_cast<const unsigned*>(&both);
  }
  __device__ static void mma(float (&c)[4], const unsigned (&a)[1][4], const unsigned (&b)[1][2]) {
    mma_bf16(c, a[0], b[0][0], b[0][1]);
  }
  __device__ static std::uint16_t times(std::uint16_t bits, float sign) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(__bfloat162float(__ushort_as_bfloat16(bits)) * sign));
  }
};

struct F16 {
  static constexpr int kParts = 1;
  static constexpr bool kF32 = false;
  __device__ static void pack(unsigned (&to)[1], float x, float y) {
    const __half2 both = __floats2half2_rn(x, y);
    to[0] = *reinterpret_cast<const unsigned*>(&both);
  }
  __device__ static void mma(float (&c)[4], const unsigned (&a)[1][4], const unsigned (&b)[1][2]) {
    mma_f16(c, a[0], b[0][0], b[0][1]);
  }
  __device__ static std::uint16_t times(std::uint16_t bits, float sign) {
    return __half_as_ushort(__float2half_rn(__half2float(__ushort_as_half(bits)) * sign));
  }
};

struct F32 {
  static constexpr int kParts = 3;
  static constexpr bool kF32 = true;
  // Rounded to nearest, so that the remainder is at most 2^-8; truncated where rounding would give infinity.
  __device__ static float first_part(float x) {
    const float nearest = __bfloat162float(__float2bfloat16_rn(x));
    return isinf(nearest) ? __uint_as_float(__float_as_uint(x) & 0xffff0000u) : nearest;
  }
  __device__ static void pack(unsigned (&to)[3], float x, float y) {
    const float x0 = first_part(x), y0 = first_part(y);
    // A value that is not finite is in the first part alone.
    const float x1 = isfinite(x) ? x - x0 : 0.0f, y1 = isfinite(y) ? y - y0 : 0.0f;
    unsigned one[1];
    Bf16::pack(one, x0, y0);
    to[0] = one[0];
    Bf16::pack(one, x1, y1);
    to[1] = one[0];
    Bf16::pack(one, x1 - __uint_as_float(one[0] << 16), y1 - __uint_as_float(one[0] & 0xffff0000u));
    to[2] = one[0];
  }
  // The small products come first, and each sum of 16 is separate: tensor cores truncate, and a long chain would be
  // biased, while the addition here rounds.
  __device__ static void mma(float (&c)[4], const unsigned (&a)[3][4], const unsigned (&b)[3][2]) {
    float sum[4] = {0, 0, 0, 0};
    mma_bf16(sum, a[2], b[0][0], b[0][1]);
    mma_bf16(sum, a[0], b[2][0], b[2][1]);
    mma_bf16(sum, a[1], b[1][0], b[1][1]);
    mma_bf16(sum, a[1], b[0][0], b[0][1]);
    mma_bf16(sum, a[0], b[1][0], b[1][1]);
    mma_bf16(sum, a[0], b[0][0], b[0][1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += sum[i];
  }
  __device__ static std::uint16_t times(std::uint16_t bits, float sign) { return Bf16::times(bits, sign); }
};

}  // namespace weft::cuda
