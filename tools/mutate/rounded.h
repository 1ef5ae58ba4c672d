// Put before a mutated file: what "rounded" mutants call. A float, or each float of a vector, loses the bits that bf16
// has not; a double becomes a float. Anything else does not compile, and such a mutant is drawn again.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

inline float weft_mutant_rounded(float x) {
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(x) + 0x8000u) & 0xffff0000u);
}
inline double weft_mutant_rounded(double x) { return static_cast<float>(x); }

template <class V>
  requires(!std::is_arithmetic_v<V> && !std::is_class_v<V> && !std::is_pointer_v<V> &&
           std::is_same_v<std::remove_cvref_t<decltype(V{}[0])>, float>)
V weft_mutant_rounded(V x) {
  for (unsigned i = 0; i < sizeof(V) / sizeof(float); ++i) x[i] = weft_mutant_rounded(static_cast<float>(x[i]));
  return x;
}
template <class T>
  requires std::is_integral_v<T>
T weft_mutant_rounded(T) = delete;
