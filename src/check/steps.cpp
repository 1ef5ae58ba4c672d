#include <vector>

#include "check/attend.h"
#include "check/device_mirror.h"
#include "check/tensors.h"
#include "index.h"
#include "kernel/check_args.h"
#include "weft/reference.h"

namespace weft::check {
namespace {

template <class Args>
Args with_keys(Args args, const KeyStep& step) {
  args.k = step.k;
  args.v = step.v;
  args.slices = step.slices;
  return args;
}

// The arguments with their host inputs mirrored where the kernel reads them. Args: of a forward or a backward.
template <class Args>
Args inputs_there(DeviceMirror& mirror, Args args) {
  args.q = mirror.in(args.q);
  args.k = mirror.in(args.k);
  args.v = mirror.in(args.v);
  args.attention = mirror.in(args.attention);
  args.place = mirror.place();
  return args;
}

// The call with its host tensors mirrored.
template <class Call>
void call_mirrored(std::string_view kernel, const KernelForwardArgs& args, const Call& call) {
  DeviceMirror mirror(place_of(kernel));
  KernelForwardArgs there = inputs_there(mirror, args);
  there.out = mirror.out(args.out);
  there.lse = mirror.out(args.lse);
  there.max_logit = mirror.out(args.max_logit);
  there.partial = mirror.out(args.partial);
  mirror.send();
  call(there);
  mirror.fetch();
}

void attend_mirrored(std::string_view kernel, const KernelForwardArgs& args) {
  call_mirrored(kernel, args, [&](const KernelForwardArgs& there) { attend(there, kernel); });
}

void exact_steps(ForwardArgs args, std::span<const KeyStep> steps, const TensorView& exact_out) {
  ReferenceState state(args.q.rows, args.q.heads, args.out.dim);
  for (const KeyStep& step : steps) reference_partial(with_keys(args, step), state);
  reference_finish(state, args);
  args.out = exact_out;
  reference_finish(state, args);
}

}  // namespace

void attend_steps(std::string_view kernel, const ForwardArgs& args, std::span<const KeyStep> steps,
                  const TensorView& exact_out) {
  if (kernel == kReference) return exact_steps(args, steps, exact_out);
  if (steps.size() == 1) return attend_mirrored(kernel, {with_keys(args, steps[0])});
  const Tensor sums(DType::f32, args.q.rows, args.q.heads, args.out.dim);
  std::vector<RowState<float>> states(at(args.q.rows * args.q.heads));
  KernelForwardArgs part{{.q = args.q, .attention = args.attention}, {sums.view, states.data()}};
  for (const KeyStep& step : steps) attend_mirrored(kernel, with_keys(part, step));
  part.out = args.out;
  part.lse = args.lse;
  part.max_logit = args.max_logit;
  call_mirrored(kernel, part, [](const KernelForwardArgs& there) { finish_partial(finish_args(there)); });
}

void attend_backward_by(std::string_view kernel, const BackwardArgs& args) {
  if (kernel == kReference) return reference_backward(args);
  DeviceMirror mirror(place_of(kernel));
  BackwardArgs there = inputs_there(mirror, args);
  there.dout = mirror.in(args.dout);
  there.out = mirror.in(args.out);
  there.lse = mirror.in(args.lse);
  there.dq = mirror.out(args.dq);
  there.dk = mirror.out(args.dk);
  there.dv = mirror.out(args.dv);
  there.dsink = mirror.out(args.dsink);
  mirror.send();
  attend_backward(there, kernel);
  mirror.fetch();
}

}  // namespace weft::check
