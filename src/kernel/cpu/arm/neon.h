// NEON vectors for the shared kernels.
#pragma once

#include <arm_neon.h>

#include "kernel/cpu/micro.h"
#include "weft/dtype.h"

namespace weft::cpu {
namespace {

struct Neon {
  using V = float32x4_t;
  using Quad = float32x4_t;
  // 4 rows x 16 columns: 16 sums, enough for FMLA's latency of 4 on 4 pipes; 24 columns make g++ spill.
  static constexpr int kLanes = 4, kPvVectors = 4, kKeys = 4, kPair = 1;
  static constexpr Index kPanel = cpu::kPanel;
  static constexpr bool kBlocked = false;

  static V load(const float* p) { return vld1q_f32(p); }
  static Quad load_quad(const float* p) { return vld1q_f32(p); }
  static void store(float* p, V x) { vst1q_f32(p, x); }
  static V all(float x) { return vdupq_n_f32(x); }
  static V zero() { return vdupq_n_f32(0); }
  static V add(V a, V b) { return vaddq_f32(a, b); }
  static V sub(V a, V b) { return vsubq_f32(a, b); }
  static V mul(V a, V b) { return vmulq_f32(a, b); }
  static V div(V a, V b) { return vdivq_f32(a, b); }
  static V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
  static V max(V a, V b) { return vmaxq_f32(a, b); }
  static V abs(V a) { return vabsq_f32(a); }
  static V copy_sign(V size, V sign) { return vbslq_f32(vdupq_n_u32(0x80000000u), sign, size); }
  template <int kLane>
  static V fma_lane(V sum, V x, Quad quad) {
    return vfmaq_laneq_f32(sum, x, quad, kLane);
  }
  static V inside_or(V value, V x, V low, V high, V other) {
    return vbslq_f32(vandq_u32(vcgeq_f32(x, low), vcleq_f32(x, high)), value, other);
  }
  static V select_less(V x, V bound, V a, V b) { return vbslq_f32(vcltq_f32(x, bound), a, b); }
  static V times_power_of_two(V p, V t) {
    // Unsigned: with an lse that is not the row's own the exponent may pass its end.
    return vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(p), vshlq_n_u32(vreinterpretq_u32_f32(t), 23)));
  }
  static void transpose4(const float* from, Index from_stride, float* to, Index to_stride, float factor) {
    const V a = vld1q_f32(from), b = vld1q_f32(from + from_stride), c = vld1q_f32(from + 2 * from_stride),
            d = vld1q_f32(from + 3 * from_stride);
    const float64x2_t ab0 = vreinterpretq_f64_f32(vtrn1q_f32(a, b)), ab1 = vreinterpretq_f64_f32(vtrn2q_f32(a, b)),
                      cd0 = vreinterpretq_f64_f32(vtrn1q_f32(c, d)), cd1 = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
    const auto put = [&](Index i, float64x2_t x) {
      vst1q_f32(to + i * to_stride, vmulq_n_f32(vreinterpretq_f32_f64(x), factor));
    };
    put(0, vzip1q_f64(ab0, cd0));
    put(1, vzip1q_f64(ab1, cd1));
    put(2, vzip2q_f64(ab0, cd0));
    put(3, vzip2q_f64(ab1, cd1));
  }

  static void widen(const bf16* from, float* to, Index n) {
    const auto* bits = reinterpret_cast<const std::uint16_t*>(from);
    Index i = 0;
    for (; i + 8 <= n; i += 8) {
      const uint16x8_t x = vld1q_u16(bits + i);
      vst1q_f32(to + i, vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16)));
      vst1q_f32(to + i + 4, vreinterpretq_f32_u32(vshll_high_n_u16(x, 16)));
    }
    for (; i < n; ++i) to[i] = static_cast<float>(from[i]);
  }
  static void widen(const f16* from, float* to, Index n) {
    const auto* halves = reinterpret_cast<const __fp16*>(from);
    Index i = 0;
    for (; i + 8 <= n; i += 8) {
      const float16x8_t x = vld1q_f16(halves + i);
      vst1q_f32(to + i, vcvt_f32_f16(vget_low_f16(x)));
      vst1q_f32(to + i + 4, vcvt_high_f32_f16(x));
    }
    for (; i < n; ++i) to[i] = static_cast<float>(halves[i]);
  }
  // Round to nearest even in integers; NaN is made quiet so that it cannot round to infinity.
  static uint16x4_t narrow4(V x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
  }
  static void narrow(const float* from, bf16* to, Index n) {
    auto* bits = reinterpret_cast<std::uint16_t*>(to);
    Index i = 0;
    for (; i + 4 <= n; i += 4) vst1_u16(bits + i, narrow4(vld1q_f32(from + i)));
    for (; i < n; ++i) to[i] = static_cast<bf16>(static_cast<double>(from[i]));
  }
  static void narrow(const float* from, f16* to, Index n) {
    auto* halves = reinterpret_cast<__fp16*>(to);
    for (Index i = 0; i < n; ++i) halves[i] = static_cast<__fp16>(from[i]);
  }
};

}  // namespace
}  // namespace weft::cpu
