// exp2, tanh and masks on vectors. S adds to micro.h:
// inside_or(value, x, low, high, other) = low <= x <= high ? value : other, select_less(x, bound, a, b) = x < bound ? a
// : b, times_power_of_two(p, t) (t's lowest bits hold the exponent), div, abs, copy_sign, and
// max(a, b), which is NaN if a is.
#pragma once

#include "kernel/cpu/micro.h"

namespace weft::cpu {

inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kLn2 = 0.69314718055994531f;

// p = 2^x on [-1/2, 1/2]; exactly 1 at 0. Degree 5, fitted to the relative error with the constant held at 1: 9e-8
// before rounding. Several at a time, step by step: the vectors' chains of fma run side by side whatever the compiler's
// order.
template <class S, int kCount>
WEFT_INLINE void exp2_of_fraction(const typename S::V* x, typename S::V* p) {
  constexpr float kTerms[] = {9.671513e-3f, 5.5507336e-2f, 0.24022242f, 0.693147f, 1.0f};
  WEFT_UNROLL for (int i = 0; i < kCount; ++i) p[i] = S::all(1.3264728e-3f);
  WEFT_UNROLL for (int k = 0; k < 5; ++k) {
    WEFT_UNROLL for (int i = 0; i < kCount; ++i) p[i] = S::fma(p[i], x[i], S::all(kTerms[k]));
  }
}

// 2^x for x <= 0 (and a little above); exactly 1 at 0, exactly 0 at -127 and below. At -127 the polynomial is 1 and the
// exponent falls to nothing: zero needs no comparison. NaN stays NaN.
template <class S, int kCount>
WEFT_INLINE void exp2_or_zero(typename S::V* x) {
  using V = typename S::V;
  const V low = S::all(-127.0f);
  const V magic = S::all(12582912.0f);  // 1.5·2^23: adding it leaves the rounded integer in the lowest bits
  V t[kCount], p[kCount];
  WEFT_UNROLL for (int i = 0; i < kCount; ++i) x[i] = S::max(x[i], low);
  WEFT_UNROLL for (int i = 0; i < kCount; ++i) t[i] = S::add(x[i], magic);
  WEFT_UNROLL for (int i = 0; i < kCount; ++i) x[i] = S::sub(x[i], S::sub(t[i], magic));
  exp2_of_fraction<S, kCount>(x, p);
  WEFT_UNROLL for (int i = 0; i < kCount; ++i) x[i] = S::times_power_of_two(p[i], t[i]);
}
template <class S>
WEFT_INLINE typename S::V exp2_or_zero(typename S::V x) {
  exp2_or_zero<S, 1>(&x);
  return x;
}

// tanh: an odd polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel, and that beyond; both fitted, 1e-7 relative.
template <class S>
WEFT_INLINE typename S::V tanh(typename S::V x) {
  using V = typename S::V;
  const V z = S::mul(x, x);
  V p = S::all(2.097684e-3f);
  p = S::fma(p, z, S::all(-8.12896e-3f));
  p = S::fma(p, z, S::all(2.1681627e-2f));
  p = S::fma(p, z, S::all(-5.3943396e-2f));
  p = S::fma(p, z, S::all(0.1333318f));
  p = S::fma(p, z, S::all(-0.3333333f));
  const V near_zero = S::fma(S::mul(p, z), x, x);
  const V size = S::abs(x);
  const V e = exp2_or_zero<S>(S::mul(size, S::all(-2 * kLog2E)));  // e^-2|x|
  const V far = S::div(S::sub(S::all(1.0f), e), S::add(S::all(1.0f), e));
  return S::select_less(size, S::all(0.625f), near_zero, S::copy_sign(far, x));
}

}  // namespace weft::cpu
