// The arithmetic of the reference in f64: rows of a slice, dot products and logits.
#pragma once

#include <cmath>

#include "index.h"
#include "kernel/check_args.h"

namespace weft::reference {

// Keys that row q of a slice sees.
inline Range keys_of(const Slice& s, Index q) {
  return {max_of(s.k_begin, shift_bound(s.lo, q)), min_of(s.k_end, shift_bound(s.hi, q + 1))};
}

inline double dot(const double* a, const double* b, Index size) {
  double sum = 0;
  for (Index i = 0; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

inline void add_scaled(double* to, double factor, const double* from, Index size) {
  for (Index i = 0; i < size; ++i) to[i] += factor * from[i];
}

// Scaled and capped logits, and their derivative.
class Logits {
 public:
  explicit Logits(const Inputs& in)
      : scale_(in.attention.scale.value_or(1 / std::sqrt(static_cast<double>(in.q.dim)))),
        softcap_(in.attention.softcap),
        dim_(in.q.dim) {}

  double operator()(const double* q, const double* k) const {
    const double x = scale_ * dot(q, k, dim_);
    return softcap_ > 0 ? softcap_ * std::tanh(x / softcap_) : x;
  }
  // d logit / d (q·k), from the logit itself.
  double slope(double logit) const {
    const double capped = softcap_ > 0 ? logit / softcap_ : 0;
    return scale_ * (1 - capped) * (1 + capped);
  }

 private:
  double scale_, softcap_;
  Index dim_;
};

// The rows of one slice as f64. Rows that see nothing and keys that nobody sees are trimmed off, and never read.
struct Block {
  Block(const Inputs& in, const Slice& slice)
      : seen(trimmed(slice, true)),
        group(in.attention.head_map.empty() ? in.q.heads / in.k.heads : 0),
        head_map(in.attention.head_map),
        q(in.q, rows()),
        k(in.k, keys()),
        v(in.v, keys()) {}

  Range rows() const { return {seen.q_begin, seen.q_end}; }
  Range keys() const { return rows().size() > 0 ? Range{seen.k_begin, seen.k_end} : Range{}; }
  Index kv_head(Index head) const { return group > 0 ? head / group : head_map[at(head)]; }

  Slice seen;
  Index group;
  std::span<const Index> head_map;
  F64Rows q, k, v;
};

}  // namespace weft::reference
