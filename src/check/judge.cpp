#include "check/judge.h"

#include <algorithm>
#include <cmath>

namespace weft::check {

Rounding rounding(DType type) {
  switch (type) {
    case DType::f64:
      return {0x1p-53, 0x1p-1074};
    case DType::f32:
      return {0x1p-24, 0x1p-150};
    case DType::bf16:
      return {0x1p-8, 0x1p-134};
    case DType::f16:
      return {0x1p-11, 0x1p-25};
    case DType::f8_e4m3:
    case DType::f8_e5m2:
      break;
  }
  detail::refuse_dtype(type);
}

Arithmetic exact_arithmetic(DType out) {
  return {.work = rounding(DType::f64), .order = 256, .probabilities = {}, .out = rounding(out), .gradients = {}};
}

Arithmetic kernel_arithmetic(DType inputs, DType gradients) {
  return {.work = rounding(DType::f32),
          .order = 16,  // sums of some hundred terms in f32, exp and tanh: 5 is seen in a hundred thousand elements
          .probabilities = size_of(inputs) == 2 ? rounding(inputs) : Rounding{},
          .out = rounding(inputs),
          .gradients = rounding(gradients)};
}

// f32 accumulates some roundings of 6e-8. A value rounded to bf16 is off by up to 2^-9 .. 2^-8 of itself, 2.2e-3 at
// most in the norm of many; P and dS, rounded too, add as much again to gradients. Sums of n terms are off by
// 0.4·sqrt(n) roundings of themselves (docs/trust.md), which counts above a thousand.
double norm_limit(DType dtype, std::string_view tensor, Index terms) {
  const bool gradient = tensor.starts_with("d");
  const bool statistic = tensor == "lse" || tensor == "max_logit";
  const double long_sums = 1.5 * std::sqrt(static_cast<double>(terms));
  switch (dtype) {
    case DType::f64:
      return std::max(1e-14, long_sums * 0x1p-53);
    case DType::f32:
      return std::max(3e-6, long_sums * 0x1p-24);
    case DType::bf16:
      return std::max(statistic ? 3e-6 : gradient ? 8e-3 : 4e-3, long_sums * 0x1p-24);
    case DType::f16:
      return std::max(statistic ? 3e-6 : gradient ? 1e-3 : 5e-4, long_sums * 0x1p-24);
    case DType::f8_e4m3:
    case DType::f8_e5m2:
      break;
  }
  detail::refuse_dtype(dtype);
}

}  // namespace weft::check
