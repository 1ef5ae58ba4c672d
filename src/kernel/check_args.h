// What the arguments of every kernel must satisfy. Each function throws Error and writes nothing.
#pragma once

#include "kernel/convert.h"
#include "weft/attention.h"
#include "weft/kernel.h"
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

// The forward whose out and lse a backward needs, where its caller did not keep them.
inline KernelForwardArgs forward_of(const BackwardArgs& args, const TensorView& out, const TensorView& lse) {
  return {{.q = args.q,
           .k = args.k,
           .v = args.v,
           .slices = args.slices,
           .device_plan = args.device_plan,
           .attention = args.attention,
           .out = out,
           .lse = lse,
           .place = args.place}};
}

// The logit of a head's sink in host memory; -inf without one.
inline double sink_logit(const Sink& sink, Index head) {
  if (sink.kind == Sink::Kind::none) return kMinusInfinity<double>;
  return sink.kind == Sink::Kind::off_by_one ? 0 : load_one(sink.logits, 0, head);
}

void check_inputs(const Inputs& in);
void check_forward(const KernelForwardArgs& args);
void check_backward(const KernelBackwardArgs& args);
// Sink and outputs of a forward for so many rows, heads and columns of v.
void check_outputs(const FinishArgs& args, Index rows, Index heads, Index dim);
// Error if there is one: for code that reads slices on the host.
void refuse_device_plan(const DevicePlan* plan);

// The outputs of a forward call, the sink that enters them and, if there are any, the partial states.
FinishArgs finish_args(const KernelForwardArgs& args);

}  // namespace weft
