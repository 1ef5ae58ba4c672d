#include "check/steps.h"

#include <vector>

#include "check/tensors.h"
#include "weft/kernel.h"

namespace weft::check {
namespace {

ForwardArgs with_keys(ForwardArgs args, const KeyStep& step) {
  args.k = step.k;
  args.v = step.v;
  args.slices = step.slices;
  return args;
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
  if (steps.size() == 1) return attend(with_keys(args, steps[0]), kernel);
  const Tensor sums(DType::f32, args.q.rows, args.q.heads, args.out.dim);
  std::vector<RowState<float>> states(static_cast<std::size_t>(args.q.rows * args.q.heads));
  ForwardArgs part{.q = args.q, .attention = args.attention, .partial = {sums.view, states.data()}};
  for (const KeyStep& step : steps) attend(with_keys(part, step), kernel);
  part.out = args.out;
  part.lse = args.lse;
  part.max_logit = args.max_logit;
  finish_partial(part);
}

void attend_backward_by(std::string_view kernel, const BackwardArgs& args) {
  if (kernel == kReference)
    reference_backward(args);
  else
    attend_backward(args, kernel);
}

}  // namespace weft::check
