// x86 with AVX512-BF16: bf16 by dot products of pairs, f32 and f16 as AVX-512 does. Compiled with those flags: nothing
// here may be called before runs_here().
#ifdef __x86_64__

#include "kernel/cpu/f32_target.h"
#include "kernel/cpu/x86/avx512.h"

namespace weft::cpu {
namespace {

struct Avx512Bf16 : Avx512 {
  // 8 sums in both products: VDPBF16PS takes longer than FMA.
  static constexpr int kPvVectors = 2, kKeys = 8, kPair = 2;
  static constexpr Index kPanel = cpu::kPanel;
  static constexpr bool kBlocked = false;

  template <int kLane>
  static V fma_lane(V sum, V x, Quad quad) {
    return _mm512_dpbf16_ps(sum, __builtin_bit_cast(__m512bh, x),
                            __builtin_bit_cast(__m512bh, _mm512_set1_ps(quad[kLane])));
  }
  static V join(V even, V odd) {
    const __m512i halves = __builtin_bit_cast(__m512i, _mm512_cvtne2ps_pbh(odd, even));  // even ones, then odd ones
    const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(halves));
    const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(halves, 1));
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
  static void store_rounded(float* to, V x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), __builtin_bit_cast(__m256i, _mm512_cvtneps_pbh(x)));
  }
  static void zip(const float* even, const float* odd, float* to, Index n) {
    for (Index i = 0; i < n; i += kLanes) {
      const auto load16 = [i](const float* row) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + i / 2)));
      };
      store(to + i, _mm512_castsi512_ps(_mm512_or_si512(load16(even), _mm512_slli_epi32(load16(odd), 16))));
    }
  }
  static void transpose4(const float* from, Index from_stride, float* to, Index to_stride) {
    __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + from_stride), c = _mm_loadu_ps(from + 2 * from_stride),
           d = _mm_loadu_ps(from + 3 * from_stride);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(to, a);
    _mm_storeu_ps(to + to_stride, b);
    _mm_storeu_ps(to + 2 * to_stride, c);
    _mm_storeu_ps(to + 3 * to_stride, d);
  }
};

}  // namespace

const Target& avx512_bf16_target() {
  static constexpr Target target = bf16_target<F32Forward<Avx512Bf16>, F32Backward<Avx512Bf16>, avx512_target>(
      "avx512_bf16", "AVX-512; bf16 by AVX512-BF16", &has_avx512_bf16);
  return target;
}

}  // namespace weft::cpu

#endif
