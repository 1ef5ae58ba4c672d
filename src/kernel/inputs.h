// The inputs that a forward and a backward have in common.
#pragma once

#include "kernel/convert.h"
#include "weft/attention.h"
#include "weft/state.h"

namespace weft {

struct Inputs {
  ConstTensorView q, k, v;
  std::span<const Slice> slices;
  const DevicePlan* device_plan;
  Attention attention;
  Place place;
};

// Of ForwardArgs or BackwardArgs.
template <class Args>
Inputs inputs_of(const Args& args) {
  return {args.q, args.k, args.v, args.slices, args.device_plan, args.attention, args.place};
}

// The logit of a head's sink in host memory; -inf without one.
inline double sink_logit(const Sink& sink, Index head) {
  if (sink.kind == Sink::Kind::none) return kMinusInfinity<double>;
  return sink.kind == Sink::Kind::off_by_one ? 0 : load_one(sink.logits, 0, head);
}

}  // namespace weft
