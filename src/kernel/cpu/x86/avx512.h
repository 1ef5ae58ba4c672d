// AVX-512 vectors for the shared kernels.
#pragma once

#include <immintrin.h>

#include "kernel/cpu/micro.h"
#include "kernel/cpu/x86/features.h"
#include "kernel/cpu/x86/x86.h"

namespace weft::cpu {
namespace {

struct Avx512 : X86Halves {
  using V = __m512;
  using Quad = const float*;
  // Sums of 8 x 2 and 4 x 4 vectors: twice what FMA's latency of 4 on 2 ports asks for, and 10 or 8 loads for 16 FMAs,
  // of which a processor does as many a cycle as FMAs.
  static constexpr int kLanes = 16, kPvVectors = 4, kKeys = 8, kPair = 1;
  static constexpr Index kPanel = 32;
  static constexpr bool kBlocked = true;

  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static Quad load_quad(const float* p) { return p; }
  static void store(float* p, V x) { _mm512_storeu_ps(p, x); }
  static V all(float x) { return _mm512_set1_ps(x); }
  static V zero() { return _mm512_setzero_ps(); }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V div(V a, V b) { return _mm512_div_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V max(V a, V b) { return _mm512_max_ps(b, a); }  // the second operand is what NaN gives
  static V abs(V a) { return _mm512_abs_ps(a); }
  static V copy_sign(V size, V sign) { return _mm512_or_ps(size, _mm512_and_ps(all(-0.0f), sign)); }
  template <int kLane>
  static V fma_lane(V sum, V x, Quad quad) {
    return _mm512_fmadd_ps(x, _mm512_set1_ps(quad[kLane]), sum);
  }
  static V inside_or(V value, V x, V low, V high, V other) {
    const __mmask16 in = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(x, low, _CMP_GE_OQ), x, high, _CMP_LE_OQ);
    return _mm512_mask_blend_ps(in, other, value);
  }
  static V select_less(V x, V bound, V a, V b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, bound, _CMP_LT_OQ), b, a);
  }
  static V times_power_of_two(V p, V t) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
  }
};

}  // namespace
}  // namespace weft::cpu
