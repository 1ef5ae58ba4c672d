// Loops over all rows of a tensor, on threads if there are many, and stores of f32 rows with rounding.
#pragma once

#include <atomic>
#include <bit>

#include "kernel/cpu/parallel.h"
#include "weft/slice.h"
#include "weft/tensor.h"

namespace weft {

// each(row) for all of them, in any order and on any thread.
template <class Each>
void each_row(const ConstTensorView& view, const Each& each) {
  constexpr Index kAtATime = 64;
  std::atomic<Index> next = 0;
  const auto body = [&] {
    for (Index first; (first = next.fetch_add(kAtATime)) < view.rows;)
      for (Index row = first; row < min_of(first + kAtATime, view.rows); ++row) each(row);
  };
  cpu::on_threads(cpu::worth_threads(view.rows * view.heads, view.dim), body);
}

// Rounds to nearest even in integer arithmetic, with the same result as bf16(double).
inline bf16 to_bf16(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const std::uint32_t rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  return bf16::from_bits(static_cast<std::uint16_t>((nan ? bits | 0x400000u : rounded) >> 16));
}

// (row, head) = factor·from[0..dim), rounded once.
inline void store_f32(const TensorView& view, Index row, Index head, const float* from, float factor) {
  with_type(view.dtype, [&]<class T>(std::type_identity<T>) {
    T* to = view.at<T>(row, head);
    for (Index i = 0; i < view.dim; ++i) {
      if constexpr (std::is_same_v<T, bf16>)
        to[i] = to_bf16(from[i] * factor);
      else
        to[i] = static_cast<T>(from[i] * factor);
    }
  });
}

}  // namespace weft
