// Units: what the products multiply, 32 bits each. One f32, or (S::kPair == 2) two bf16 that are contracted together.
// Buffers of pairs are float* too, but their bits are only ever moved.
#pragma once

#include <cstring>

#include "index.h"
#include "kernel/cpu/rows.h"

namespace weft::cpu {

// Units of a row of `dim` numbers that a product contracts, four at a time.
template <class S>
WEFT_INLINE constexpr Index units_of(Index dim) {
  return round_up(dim, 4 * S::kPair) / S::kPair;
}

WEFT_INLINE void clear_units(float* to, Index units) { std::memset(to, 0, at(units) * sizeof(float)); }

// The elements of (row, head), then zeros up to `units`.
template <class S>
WEFT_INLINE void load_units(const ConstTensorView& view, Index row, Index head, float* to, Index units) {
  if constexpr (S::kPair == 1) {
    load_f32<S>(view, row, head, to, units);
  } else {
    const std::size_t bytes = at(view.dim) * sizeof(bf16);
    std::memcpy(to, view.at<bf16>(row, head), bytes);
    std::memset(reinterpret_cast<char*>(to) + bytes, 0, at(units) * sizeof(float) - bytes);
  }
}

// Rows for products that contract rows: to[row / 2][i] = {rows[row][i], rows[row + 1][i]}. f32 has nothing to do: there
// `to` must be `rows`.
template <class S>
WEFT_INLINE void pair_rows(const float* rows, Index count, Index units, float* to) {
  if constexpr (S::kPair == 2)
    for (Index r = 0; r < count; r += 2) S::zip(rows + r * units, rows + (r + 1) * units, to + r * units, 2 * units);
}

// x[0..kPair) as one unit per lane, rounded if it is a pair.
template <class S>
WEFT_INLINE typename S::V join(const typename S::V* x) {
  if constexpr (S::kPair == 1)
    return x[0];
  else
    return S::join(x[0], x[1]);
}

}  // namespace weft::cpu
