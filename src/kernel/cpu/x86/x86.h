// What AVX2 and AVX-512 share: conversions of 16-bit floats and the 4 x 4 transpose.
#pragma once

#include <immintrin.h>

#include "weft/dtype.h"

namespace weft::cpu {
namespace {

struct X86Halves {
  static void transpose4(const float* from, Index from_stride, float* to, Index to_stride, float factor) {
    const __m128 f = _mm_set1_ps(factor);
    __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + from_stride), c = _mm_loadu_ps(from + 2 * from_stride),
           d = _mm_loadu_ps(from + 3 * from_stride);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(to, _mm_mul_ps(a, f));
    _mm_storeu_ps(to + to_stride, _mm_mul_ps(b, f));
    _mm_storeu_ps(to + 2 * to_stride, _mm_mul_ps(c, f));
    _mm_storeu_ps(to + 3 * to_stride, _mm_mul_ps(d, f));
  }

  static void widen(const bf16* from, float* to, Index n) {
    Index i = 0;
    for (; i + 8 <= n; i += 8) {
      const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      _mm256_storeu_ps(to + i, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)));
    }
    for (; i < n; ++i) to[i] = static_cast<float>(from[i]);
  }
  static void widen(const f16* from, float* to, Index n) {
    Index i = 0;
    for (; i + 8 <= n; i += 8)
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    for (; i < n; ++i) to[i] = static_cast<float>(from[i]);
  }
  // Round to nearest even in integers; NaN is made quiet so that it cannot round to infinity.
  static void narrow(const float* from, bf16* to, Index n) {
    Index i = 0;
    for (; i + 8 <= n; i += 8) {
      const __m256 x = _mm256_loadu_ps(from + i);
      const __m256i bits = _mm256_castps_si256(x);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
      const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
      const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
      const __m256i number = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_EQ_OQ));
      const __m256i top = _mm256_srli_epi32(_mm256_blendv_epi8(quiet, rounded, number), 16);
      const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(top, top), 0x88);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_castsi256_si128(packed));
    }
    for (; i < n; ++i) to[i] = static_cast<bf16>(static_cast<double>(from[i]));
  }
  static void narrow(const float* from, f16* to, Index n) {
    Index i = 0;
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    for (; i < n; ++i) to[i] = static_cast<f16>(static_cast<double>(from[i]));
  }
};

}  // namespace
}  // namespace weft::cpu
