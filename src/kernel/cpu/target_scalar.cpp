// Plain C++: runs on every machine, and defines what the other targets must compute.
#include <cmath>

#include "kernel/cpu/f32_target.h"

namespace weft::cpu {
namespace {

struct Scalar {
  using V = float;
  using Quad = const float*;
  static constexpr int kLanes = 1, kPvVectors = 8, kKeys = 4, kPair = 1;
  static constexpr Index kPanel = cpu::kPanel;
  static constexpr bool kBlocked = false;

  static V load(const float* p) { return *p; }
  static Quad load_quad(const float* p) { return p; }
  static void store(float* p, V x) { *p = x; }
  static V all(float x) { return x; }
  static V zero() { return 0; }
  static V add(V a, V b) { return a + b; }
  static V sub(V a, V b) { return a - b; }
  static V mul(V a, V b) { return a * b; }
  static V div(V a, V b) { return a / b; }
  static V fma(V a, V b, V c) { return a * b + c; }
  static V max(V a, V b) { return a > b || a != a ? a : b; }
  static V abs(V a) { return std::fabs(a); }
  static V copy_sign(V size, V sign) { return std::copysign(size, sign); }
  template <int kLane>
  static V fma_lane(V sum, V x, Quad quad) {
    return sum + x * quad[kLane];
  }
  static V inside_or(V value, V x, V low, V high, V other) { return x >= low && x <= high ? value : other; }
  static V select_less(V x, V bound, V a, V b) { return x < bound ? a : b; }
  static V times_power_of_two(V p, V t) {
    const auto bits = __builtin_bit_cast(std::uint32_t, p) + (__builtin_bit_cast(std::uint32_t, t) << 23);
    return __builtin_bit_cast(float, bits);
  }
  static void transpose4(const float* from, Index from_stride, float* to, Index to_stride, float factor) {
    for (Index r = 0; r < 4; ++r)
      for (Index i = 0; i < 4; ++i) to[i * to_stride + r] = factor * from[r * from_stride + i];
  }
  template <class T>
  static void widen(const T* from, float* to, Index n) {
    for (Index i = 0; i < n; ++i) to[i] = static_cast<float>(from[i]);
  }
  template <class T>
  static void narrow(const float* from, T* to, Index n) {
    for (Index i = 0; i < n; ++i) to[i] = static_cast<T>(static_cast<double>(from[i]));
  }
};

}  // namespace

const Target& scalar_target() {
  static constexpr Target target = f32_target<Scalar>("scalar", "plain C++ in f32", [] { return true; });
  return target;
}

}  // namespace weft::cpu
