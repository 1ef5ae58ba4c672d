#include "weft/dtype.h"

#include <cmath>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "refusal.h"
#include "weft/kernel.h"

namespace weft {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// What the two formats are, told apart from their implementation.
template <class T>
struct Format;
template <>
struct Format<bf16> {
  static constexpr int precision = 8, least_exponent = -126;
  static constexpr double largest = 0x1.fep127;
  static constexpr std::uint16_t infinity = 0x7f80;
};
template <>
struct Format<f16> {
  static constexpr int precision = 11, least_exponent = -14;
  static constexpr double largest = 65504;
  static constexpr std::uint16_t infinity = 0x7c00;
};

// Rounding by the C library: scale so that the last place becomes 1, round to nearest even, scale back.
template <class T>
double rounded(double x) {
  using F = Format<T>;
  if (x == 0 || !std::isfinite(x)) return x;
  const int exponent = std::max(std::ilogb(x), F::least_exponent);
  const int last_place = exponent - (F::precision - 1);
  const double result = std::ldexp(std::nearbyint(std::ldexp(x, -last_place)), last_place);
  return std::abs(result) > F::largest ? std::copysign(kInfinity, x) : result;
}

template <class T>
class Float16Test : public testing::Test {};
using Types = testing::Types<bf16, f16>;
TYPED_TEST_SUITE(Float16Test, Types);

// The value of a pattern, from the definition of the format.
template <class T>
double value_of(std::uint16_t bits) {
  using F = Format<T>;
  const int mantissa_bits = F::precision - 1;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, F::least_exponent - mantissa_bits)
                    : std::ldexp(mantissa + (1 << mantissa_bits), F::least_exponent - mantissa_bits + exponent - 1);
  return bits & 0x8000 ? -magnitude : magnitude;
}

TYPED_TEST(Float16Test, EveryPatternWidensExactlyAndComesBack) {
  using T = TypeParam;
  for (int pattern = 0; pattern < 65536; ++pattern) {
    const auto bits = static_cast<std::uint16_t>(pattern);
    const float wide = T::from_bits(bits);
    const int magnitude = pattern & 0x7fff;
    ASSERT_EQ(std::isnan(wide), magnitude > Format<T>::infinity) << pattern;
    ASSERT_EQ(std::isinf(wide), magnitude == Format<T>::infinity) << pattern;
    ASSERT_EQ(std::signbit(wide), (pattern & 0x8000) != 0) << pattern;
    if (std::isfinite(wide)) {
      ASSERT_EQ(wide, value_of<T>(bits)) << pattern;
    }
    const T back{wide};
    if (std::isnan(wide)) {
      ASSERT_TRUE(std::isnan(static_cast<float>(back))) << pattern;
    } else {
      ASSERT_EQ(back.bits, bits) << pattern;
    }
  }
}

TYPED_TEST(Float16Test, TiesBetweenNeighboursGoToEven) {
  using T = TypeParam;
  for (std::uint16_t low = 0; low + 1 < Format<T>::infinity; ++low) {
    const auto high = static_cast<std::uint16_t>(low + 1);
    const double a = value_of<T>(low), b = value_of<T>(high), middle = (a + b) / 2;
    ASSERT_EQ(T(middle).bits, low % 2 == 0 ? low : high) << low;
    ASSERT_EQ(T(-middle).bits & 0x7fff, low % 2 == 0 ? low : high) << low;
    ASSERT_EQ(T(std::nextafter(middle, a)).bits, low) << low;
    ASSERT_EQ(T(std::nextafter(middle, b)).bits, high) << low;
  }
}

TYPED_TEST(Float16Test, EdgesOfTheRange) {
  using T = TypeParam;
  const double largest = Format<T>::largest, step = largest - value_of<T>(Format<T>::infinity - 2);
  EXPECT_EQ(T(largest).bits, Format<T>::infinity - 1);
  EXPECT_EQ(T(std::nextafter(largest + step / 2, 0)).bits, Format<T>::infinity - 1);
  EXPECT_EQ(T(largest + step / 2).bits, Format<T>::infinity);
  EXPECT_EQ(T(-std::numeric_limits<double>::max()).bits, Format<T>::infinity | 0x8000);
  EXPECT_EQ(T(kInfinity).bits, Format<T>::infinity);
  const double least = value_of<T>(1);
  EXPECT_EQ(T(least / 2).bits, 0);
  EXPECT_EQ(T(std::nextafter(least / 2, 1)).bits, 1);
  EXPECT_EQ(T(-least / 4).bits, 0x8000);
  EXPECT_EQ(T(std::numeric_limits<double>::denorm_min()).bits, 0);
  EXPECT_TRUE(std::isnan(static_cast<float>(T(std::nan("")))));
  EXPECT_TRUE(std::isnan(static_cast<float>(T(std::numeric_limits<double>::signaling_NaN()))));
}

TYPED_TEST(Float16Test, RandomDoublesRoundAsTheCLibraryRounds) {
  using T = TypeParam;
  std::mt19937_64 random(1);
  for (int i = 0; i < 200000; ++i) {
    const double mantissa = 1 + static_cast<double>(random() >> 12) * 0x1p-52;
    const int exponent = static_cast<int>(random() % 300) - 160;
    const double x = std::ldexp(random() % 2 == 0 ? mantissa : -mantissa, exponent);
    ASSERT_EQ(static_cast<float>(T(x)), rounded<T>(x)) << x;
  }
}

// 1 + half a place + a little: float drops the little and makes a tie of it.
TEST(Float16, RoundsOnceFromDouble) {
  const double f16_tie = 1 + 0x1p-11, bf16_tie = 1 + 0x1p-8;
  EXPECT_EQ(static_cast<float>(f16(f16_tie + 0x1p-40)), 1 + 0x1p-10f);
  EXPECT_EQ(static_cast<float>(f16(static_cast<float>(f16_tie + 0x1p-40))), 1.0f);
  EXPECT_EQ(static_cast<float>(bf16(bf16_tie + 0x1p-40)), 1 + 0x1p-7f);
}

TEST(DType, NamesSizesAndTypes) {
  for (const DType d : kDTypes) {
    EXPECT_EQ(dtype(name(d)), d);
    EXPECT_EQ(size_of(d), with_type(d, []<class T>(std::type_identity<T>) { return static_cast<Index>(sizeof(T)); }));
  }
  EXPECT_EQ(name(DType::bf16), "bf16");
  EXPECT_TRUE(with_type(DType::f16, []<class T>(std::type_identity<T>) { return std::is_same_v<T, f16>; }));
  EXPECT_TRUE(with_type(DType::bf16, []<class T>(std::type_identity<T>) { return std::is_same_v<T, bf16>; }));
}

TEST(DType, UnknownNameIsRefused) {
  EXPECT_EQ(error_of([] { dtype("fp8"); }), "no dtype is named 'fp8'; use one of f64, f32, bf16, f16");
}

// They were taken for f16, and two bytes were written where there is room for one.
TEST(DType, OfEightBitsIsNeverComputedWith) {
  for (const DType d : {DType::f8_e4m3, DType::f8_e5m2}) {
    EXPECT_EQ(size_of(d), 1);
    const std::string refused = std::string("dtype ") + std::string(name(d)) + " needs a scale for every block";
    expect_refusal([&] { dtype(name(d)); }, {refused});
    expect_refusal([&] { with_type(d, []<class T>(std::type_identity<T>) { FAIL() << sizeof(T) << " bytes"; }); },
                   {refused});
    for (const Kernel& kernel : kernels())
      for (const Pass pass : {Pass::forward, Pass::backward})
        EXPECT_TRUE(kernel.refusal({.pass = pass, .dtype = d, .dim_qk = 8, .dim_v = 8})) << kernel.name;
  }
}

}  // namespace
}  // namespace weft
