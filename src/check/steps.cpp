#include "check/steps.h"

#include <vector>

#include "check/tensors.h"
#include "check/twins.h"
#include "index.h"
#include "weft/kernel.h"

namespace weft::check {
namespace {

ForwardArgs with_keys(ForwardArgs args, const KeyStep& step) {
  args.k = step.k;
  args.v = step.v;
  args.slices = step.slices;
  return args;
}

// The call where the kernel wants it, on tensors of the host.
template <class Call>
void there(std::string_view kernel, const ForwardArgs& args, const Call& call) {
  const Place place = place_of(kernel);
  Twins twins(place);
  ForwardArgs on = args;
  on.q = twins.in(args.q);
  on.k = twins.in(args.k);
  on.v = twins.in(args.v);
  on.attention = twins.in(args.attention);
  on.out = twins.out(args.out);
  on.lse = twins.out(args.lse);
  on.max_logit = twins.out(args.max_logit);
  on.partial = twins.out(args.partial);
  on.place = place;
  twins.send();
  call(on);
  twins.fetch();
}

void attend_there(std::string_view kernel, const ForwardArgs& args) {
  there(kernel, args, [&](const ForwardArgs& on) { attend(on, kernel); });
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
  if (steps.size() == 1) return attend_there(kernel, with_keys(args, steps[0]));
  const Tensor sums(DType::f32, args.q.rows, args.q.heads, args.out.dim);
  std::vector<RowState<float>> states(at(args.q.rows * args.q.heads));
  ForwardArgs part{.q = args.q, .attention = args.attention, .partial = {sums.view, states.data()}};
  for (const KeyStep& step : steps) attend_there(kernel, with_keys(part, step));
  part.out = args.out;
  part.lse = args.lse;
  part.max_logit = args.max_logit;
  there(kernel, part, [](const ForwardArgs& on) { finish_partial(on); });
}

void attend_backward_by(std::string_view kernel, const BackwardArgs& args) {
  if (kernel == kReference) return reference_backward(args);
  const Place place = place_of(kernel);
  Twins twins(place);
  BackwardArgs on = args;
  on.q = twins.in(args.q);
  on.k = twins.in(args.k);
  on.v = twins.in(args.v);
  on.attention = twins.in(args.attention);
  on.dout = twins.in(args.dout);
  on.out = twins.in(args.out);
  on.lse = twins.in(args.lse);
  on.dq = twins.out(args.dq);
  on.dk = twins.out(args.dk);
  on.dv = twins.out(args.dv);
  on.dsink = twins.out(args.dsink);
  on.place = place;
  twins.send();
  attend_backward(on, kernel);
  twins.fetch();
}

}  // namespace weft::check
