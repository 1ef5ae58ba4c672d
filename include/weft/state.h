// Partial softmax states of a row after some of its keys, as an algebra with an identity: kernels, ring steps and tests
// share it.
#pragma once

#include <cmath>
#include <limits>

#include "weft/config.h"

namespace weft {

// The logit of a key that contributes nothing.
template <class T>
inline constexpr T kMinusInfinity = -std::numeric_limits<T>::infinity();

// The larger of two; NaN if either is, so that a NaN among visible logits is never hidden.
template <class T>
WEFT_HD inline T max_or_nan(T a, T b) {
  return a > b || std::isnan(a) ? a : b;
}

// Largest logit so far and the sum of exp(logit - max). Its accumulator row, which is stored apart, is the
// sum of exp(logit - max)·v. The identity is the default: no keys. A state never holds the sink; finish adds it once.
template <class T>
struct RowState {
  T max = kMinusInfinity<T>;
  T sum = 0;

  friend bool operator==(const RowState&, const RowState&) = default;
};

// Whether no key has contributed to the state.
template <class T>
WEFT_HD inline bool is_empty(const RowState<T>& state) {
  return state.max == kMinusInfinity<T>;
}

// The state of one key (its accumulator is v). A logit of -inf contributes nothing.
template <class T>
WEFT_HD inline RowState<T> state_of(T logit) {
  return {logit, logit == kMinusInfinity<T> ? T{0} : T{1}};
}

// Two states merged, and how their accumulators are: weight_a·a + weight_b·b. The weight of an empty state is 0 and its
// accumulator need not be read; the other weight, or the one of the larger maximum, is exactly 1.
template <class T>
struct MergedState {
  RowState<T> state;
  T weight_a = 0, weight_b = 0;

  // One product and one sum, the same for (a, b) and (b, a) whether or not the compiler makes an fma of them.
  WEFT_HD T operator()(T a, T b) const { return weight_a == T{1} ? a + weight_b * b : b + weight_a * a; }
};

// Merges two states of disjoint keys of one row.
template <class T>
WEFT_HD inline MergedState<T> merge(const RowState<T>& a, const RowState<T>& b) {
  const T max = max_or_nan(a.max, b.max);
  // Empty states are handled apart: exp(-inf - -inf) would be NaN.
  MergedState<T> merged{
      {max, 0}, is_empty(a) ? T{0} : std::exp(a.max - max), is_empty(b) ? T{0} : std::exp(b.max - max)};
  merged.state.sum = merged(a.sum, b.sum);
  return merged;
}

// What a finished row has: output row = accumulator · weight.
template <class T>
struct FinishedRow {
  T lse = kMinusInfinity<T>;  // natural log, with the sink
  T weight = 0;               // 0 for a row without keys; its accumulator need not be read
};

// Ends a row. The sink is a logit without a value that enters the denominator; -inf: none. Without keys lse is the
// sink.
template <class T>
WEFT_HD inline FinishedRow<T> finish(const RowState<T>& state, T sink = kMinusInfinity<T>) {
  if (is_empty(state)) return {sink, T{0}};
  const T max = max_or_nan(state.max, sink);
  const T scale = std::exp(state.max - max);
  const T total = state.sum * scale + std::exp(sink - max);
  return {max + std::log(total), scale / total};
}

// Merges state b, accumulator_b [dim] into state a, accumulator_a [dim].
template <class T>
WEFT_HD inline void merge_row(RowState<T>& a, T* accumulator_a, const RowState<T>& b, const T* accumulator_b,
                              Index dim) {
  if (is_empty(b)) return;
  const MergedState<T> merged = merge(a, b);
  const bool first = is_empty(a);
  for (Index i = 0; i < dim; ++i) {
    accumulator_a[i] = first ? accumulator_b[i] : merged(accumulator_a[i], accumulator_b[i]);
  }
  a = merged.state;
}

}  // namespace weft
