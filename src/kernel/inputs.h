// What forward and backward share: their inputs, their checks, and the one place where a logit is computed.
#pragma once

#include <cmath>

#include "index.h"
#include "kernel/convert.h"
#include "weft/attention.h"

namespace weft::reference {

struct Inputs {
  ConstTensorView q, k, v;
  std::span<const Slice> slices;
  const DevicePlan* device_plan;
  Attention attention;
  Place place;
};

template <class Args>
Inputs inputs_of(const Args& args) {
  return {args.q, args.k, args.v, args.slices, args.device_plan, args.attention, args.place};
}

void check_inputs(const Inputs& in);
void check_outputs(const ForwardArgs& args, Index rows, Index heads, Index dim);
void check_backward(const BackwardArgs& args);
void refuse_device_plan(const DevicePlan* plan);  // by those who read slices on the host

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

inline double sink_logit(const Sink& sink, Index head) {
  if (sink.kind == Sink::Kind::none) return kMinusInfinity<double>;
  return sink.kind == Sink::Kind::off_by_one ? 0 : load_one(sink.logits, 0, head);
}

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
    const double bent = softcap_ > 0 ? logit / softcap_ : 0;
    return scale_ * (1 - bent) * (1 + bent);
  }

 private:
  double scale_, softcap_;
  Index dim_;
};

// One slice's rows as f64. Rows that see nothing, and keys that nobody sees, were cut off and are not read.
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
