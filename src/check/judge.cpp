#include "check/judge.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace weft::check {

namespace {

// How a dtype rounds, and relative norms of the errors of results in it.
struct Precision {
  Rounding rounding;
  double sums, statistics, out, gradients;  // sums: of one rounding of a long sum
};

// f32 accumulates some roundings of 6e-8. A value rounded to bf16 is off by up to 2^-9 .. 2^-8 of itself, 2.2e-3 at
// most in the norm of many; P and dS, rounded too, add as much again to gradients.
constexpr Precision kPrecisions[] = {{{0x1p-53, 0x1p-1074}, 0x1p-53, 1e-14, 1e-14, 1e-14},  // in the order of kDTypes
                                     {{0x1p-24, 0x1p-150}, 0x1p-24, 3e-6, 3e-6, 3e-6},
                                     {{0x1p-8, 0x1p-134}, 0x1p-24, 3e-6, 4e-3, 8e-3},
                                     {{0x1p-11, 0x1p-25}, 0x1p-24, 3e-6, 5e-4, 1e-3}};

const Precision& precision(DType dtype) {
  const auto found = std::find(std::begin(kDTypes), std::end(kDTypes), dtype);
  if (found == std::end(kDTypes)) detail::refuse_dtype(dtype);
  return kPrecisions[found - std::begin(kDTypes)];
}

}  // namespace

Rounding rounding(DType type) { return precision(type).rounding; }

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

// Sums of n terms are off by 0.4·sqrt(n) roundings of themselves (docs/trust.md), which counts above a thousand.
double norm_limit(DType dtype, std::string_view tensor, Index terms) {
  const Precision& p = precision(dtype);
  const double limit = tensor == "lse" || tensor == "max_logit" ? p.statistics
                       : tensor.starts_with("d")                ? p.gradients
                                                                : p.out;
  return std::max(limit, 1.5 * std::sqrt(static_cast<double>(terms)) * p.sums);
}

}  // namespace weft::check
