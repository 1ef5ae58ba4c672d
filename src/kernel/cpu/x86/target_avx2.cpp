// x86 with AVX2, FMA and F16C. Compiled with those flags: nothing here may be called before runs_here().
#ifdef __x86_64__

#include <immintrin.h>

#include "kernel/cpu/f32_target.h"
#include "kernel/cpu/x86/features.h"
#include "kernel/cpu/x86/x86.h"

namespace weft::cpu {
namespace {

struct Avx2 : X86Halves {
  using V = __m256;
  using Quad = const float*;
  // 4 rows x 16 columns: 8 sums for FMA's latency of 4 on 2 ports, within 16 registers.
  static constexpr int kLanes = 8, kPvVectors = 2, kKeys = 4, kPair = 1;
  static constexpr Index kPanel = cpu::kPanel;
  static constexpr bool kBlocked = false;

  static V load(const float* p) { return _mm256_loadu_ps(p); }
  static Quad load_quad(const float* p) { return p; }
  static void store(float* p, V x) { _mm256_storeu_ps(p, x); }
  static V all(float x) { return _mm256_set1_ps(x); }
  static V zero() { return _mm256_setzero_ps(); }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V div(V a, V b) { return _mm256_div_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V max(V a, V b) { return _mm256_max_ps(b, a); }  // the second operand is what NaN gives
  static V abs(V a) { return _mm256_andnot_ps(all(-0.0f), a); }
  static V copy_sign(V size, V sign) { return _mm256_or_ps(size, _mm256_and_ps(all(-0.0f), sign)); }
  template <int kLane>
  static V fma_lane(V sum, V x, Quad quad) {
    return _mm256_fmadd_ps(x, _mm256_broadcast_ss(quad + kLane), sum);
  }
  static V inside_or(V value, V x, V low, V high, V other) {
    const V in = _mm256_and_ps(_mm256_cmp_ps(x, low, _CMP_GE_OQ), _mm256_cmp_ps(x, high, _CMP_LE_OQ));
    return _mm256_blendv_ps(other, value, in);
  }
  static V select_less(V x, V bound, V a, V b) { return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, bound, _CMP_LT_OQ)); }
  static V times_power_of_two(V p, V t) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
  }
};

}  // namespace

const Target& avx2_target() {
  static constexpr Target target = f32_target<Avx2>("avx2", "AVX2 and FMA in f32", &has_avx2);
  return target;
}

}  // namespace weft::cpu

#endif
