// The exact reference that all other kernels are judged by. All arithmetic is f64; every output is rounded once, to the
// dtype of its view. Slices are read on the host. Every function throws Error, which names the tensor, the values and
// the way out, before it writes anything.
#pragma once

#include <vector>

#include "weft/attention.h"
#include "weft/kernel.h"
#include "weft/state.h"

namespace weft {

// The forward in f64; KernelForwardArgs may ask for partial states instead of outputs.
WEFT_API void reference_forward(const ForwardArgs& args);
WEFT_API void reference_forward(const KernelForwardArgs& args);
// The backward in f64; KernelBackwardArgs may ask that dk and dv are added to.
WEFT_API void reference_backward(const BackwardArgs& args);
WEFT_API void reference_backward(const KernelBackwardArgs& args);

// The partial softmax states of every query row after some of its keys, in f64.
struct ReferenceState {
  ReferenceState(Index tokens_q, Index heads_q, Index dim_v)
      : rows(tokens_q),
        heads(heads_q),
        dim(dim_v),
        states(static_cast<std::size_t>(rows * heads)),
        accumulators(static_cast<std::size_t>(rows * heads * dim)),
        max_logit(static_cast<std::size_t>(heads), kMinusInfinity<double>) {}

  Index rows, heads, dim;
  std::vector<RowState<double>> states;  // [tq, hq]
  std::vector<double> accumulators;      // [tq, hq, dv], not normalised
  std::vector<double> max_logit;         // [hq]
};

// Adds the keys of `slices` to the state: reads q, k, v, slices and attention of `args`.
WEFT_API void reference_partial(const ForwardArgs& args, ReferenceState& state);
// Ends all partial calls: reads the sink of `args` and writes its out, lse and max_logit.
WEFT_API void reference_finish(const ReferenceState& state, const ForwardArgs& args);

}  // namespace weft
