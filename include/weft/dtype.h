// Element types: their sizes and names, and the two 16-bit floats with exact conversions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "weft/config.h"

namespace weft {

// Element types. The two of 8 bits have names so that they can be refused by name.
enum class DType { f64, f32, bf16, f16, f8_e4m3, f8_e5m2 };

// The element types that kernels compute with.
inline constexpr DType kDTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

// Bytes of an element. No switch: kernels for GPUs inline it, and with another form of it the assembler runs out of
// registers for them.
WEFT_HD constexpr Index size_of(DType dtype) {
  return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : dtype == DType::bf16 || dtype == DType::f16 ? 2 : 1;
}
// The dtype of sums over steps and ranks, which are rounded once at the end.
WEFT_HD constexpr DType sum_type(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }
// The name of a dtype, such as "bf16".
WEFT_API std::string_view name(DType dtype);
// The dtype of that name, one of kDTypes. Error lists the names, or says why a dtype that has one cannot be computed
// with.
WEFT_API DType dtype(std::string_view name);

namespace detail {

[[noreturn]] WEFT_API void refuse_dtype(DType dtype);  // Error: not one of kDTypes

// Rounds to the nearest float of 1 + kExponent + kMantissa = 16 bits, ties to even. Straight from double: going through
// float would round twice.
template <int kExponent, int kMantissa>
WEFT_HD constexpr std::uint16_t round_to_16(double value) {
  constexpr std::uint64_t kOne = 1;
  constexpr std::uint64_t kInfinity = ((kOne << kExponent) - 1) << kMantissa;
  constexpr std::int64_t kBias = (std::int64_t{1} << (kExponent - 1)) - 1;
  const std::uint64_t bits = __builtin_bit_cast(std::uint64_t, value);
  const std::uint64_t sign = bits >> 63 << 15;
  const std::uint64_t fraction = bits & ((kOne << 52) - 1);
  const std::int64_t biased = static_cast<std::int64_t>(bits >> 52 & 0x7ff);
  if (biased == 0x7ff && fraction != 0) {  // NaN stays NaN: made quiet, and keeps the top of its payload
    return static_cast<std::uint16_t>(sign | kInfinity | kOne << (kMantissa - 1) | fraction >> (52 - kMantissa));
  }
  const std::uint64_t significand = fraction | (biased > 0 ? kOne << 52 : 0);
  std::int64_t exponent = biased - 1023;
  std::int64_t drop = 52 - kMantissa;
  if (exponent < 1 - kBias) {  // subnormal here: the exponent stays, more bits go; past 54 every value is below half
    drop += 1 - kBias - exponent;
    drop = drop < 54 ? drop : 54;
    exponent = 1 - kBias;
  }
  const std::uint64_t rest = significand & ((kOne << drop) - 1);
  const std::uint64_t half = kOne << (drop - 1);
  std::uint64_t kept = significand >> drop;
  if (rest > half || (rest == half && (kept & 1) != 0)) ++kept;
  // The leading bit of `kept` is the last step of the exponent, so a carry out of the mantissa lands where it should.
  std::uint64_t magnitude = (static_cast<std::uint64_t>(exponent + kBias - 1) << kMantissa) + kept;
  if (magnitude > kInfinity) magnitude = kInfinity;
  return static_cast<std::uint16_t>(sign | magnitude);
}

template <int kExponent, int kMantissa>
WEFT_HD constexpr float float_from_16(std::uint16_t half) {
  const std::uint32_t bits = half;
  if constexpr (kExponent == 8) {
    return __builtin_bit_cast(float, bits << 16);
  } else {
    constexpr std::uint32_t kBias = (1u << (kExponent - 1)) - 1;
    constexpr std::uint32_t kTop = (1u << kExponent) - 1;
    const std::uint32_t sign = bits >> 15 << 31;
    const std::uint32_t exponent = bits >> kMantissa & kTop;
    const std::uint32_t mantissa = bits & ((1u << kMantissa) - 1);
    if (exponent == 0) {  // mantissa · 2^(1 - bias - kMantissa), exact
      constexpr float kStep = __builtin_bit_cast(float, (127u + 1u - kBias - kMantissa) << 23);
      const float magnitude = static_cast<float>(mantissa) * kStep;
      return __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, magnitude) | sign);
    }
    const std::uint32_t wide = exponent == kTop ? 255u : exponent + 127u - kBias;
    return __builtin_bit_cast(float, sign | wide << 23 | mantissa << (23 - kMantissa));
  }
}

}  // namespace detail

// A 16-bit float in memory. Arithmetic happens in float: widening is exact and implicit, rounding is asked for.
template <int kExponent, int kMantissa>
struct Float16 {
  std::uint16_t bits;

  Float16() = default;  // trivial, as for float
  WEFT_HD constexpr explicit Float16(double value) : bits(detail::round_to_16<kExponent, kMantissa>(value)) {}
  // NOLINTNEXTLINE(google-explicit-constructor): nothing is lost on the way up
  WEFT_HD constexpr operator float() const { return detail::float_from_16<kExponent, kMantissa>(bits); }
  WEFT_HD static constexpr Float16 from_bits(std::uint16_t bits) {
    Float16 result(0.0);
    result.bits = bits;
    return result;
  }
};

// Elements of bfloat16, and of IEEE half precision.
using bf16 = Float16<8, 7>;
using f16 = Float16<5, 10>;
static_assert(sizeof(bf16) == 2 && sizeof(f16) == 2 && std::is_trivial_v<bf16>);

// Calls f(std::type_identity<T>{}) with the C++ type of `dtype`. Error unless it is one of kDTypes. Switches over
// dtypes name every one of them and have no default: the compiler finds those that a new one needs.
template <class F>
constexpr decltype(auto) with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f64:
      return f(std::type_identity<double>{});
    case DType::f32:
      return f(std::type_identity<float>{});
    case DType::bf16:
      return f(std::type_identity<bf16>{});
    case DType::f16:
      return f(std::type_identity<f16>{});
    case DType::f8_e4m3:
    case DType::f8_e5m2:
      break;
  }
  detail::refuse_dtype(dtype);
}

}  // namespace weft
