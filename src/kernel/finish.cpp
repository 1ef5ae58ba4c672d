// The end of partial states.
#include <algorithm>
#include <vector>

#include "kernel/each_row.h"
#include "kernel/reference/inputs.h"
#include "weft/error.h"
#include "weft/kernel.h"

#ifdef WEFT_WITH_CUDA
#include "kernel/cuda/portable.h"
#endif

namespace weft {
namespace {

void finish_row(const ForwardArgs& args, const std::vector<float>& sinks, Index row,
                const std::vector<float>& nothing) {
  const TensorView& sums = args.partial.sums;
  for (Index h = 0; h < sums.heads; ++h) {
    const RowState<float>& state = args.partial.states[row * sums.heads + h];
    const FinishedRow<float> done = finish(state, sinks[static_cast<std::size_t>(h)]);
    if (is_empty(state))
      store_f32(args.out, row, h, nothing.data(), 0);
    else
      store_f32(args.out, row, h, sums.at<float>(row, h), done.weight);
    if (args.lse.given()) store_f32(args.lse, row, h, &done.lse, 1);
  }
}

}  // namespace

void finish_partial(const ForwardArgs& args) {
  if (!args.partial.given())
    throw Error("finish_partial without partial states", "give the partial of the attend calls");
  const TensorView& sums = args.partial.sums;
  ForwardArgs bare = args;
  bare.partial = {};
  reference::check_outputs(bare, sums.rows, sums.heads, sums.dim);
  if (args.place.kind == DeviceKind::cuda) {
#ifdef WEFT_WITH_CUDA
    cuda::finish_partial(args);
    return;
#else
    throw Error("finish_partial of states on a GPU in a build without CUDA", "build with WEFT_CUDA=ON");
#endif
  }
  std::vector<float> sinks, nothing(static_cast<std::size_t>(sums.dim), 0.0F);
  for (Index h = 0; h < sums.heads; ++h)
    sinks.push_back(static_cast<float>(reference::sink_logit(args.attention.sink, h)));
  each_row(sums, [&](Index row) { finish_row(args, sinks, row, nothing); });
  for (Index h = 0; args.max_logit.given() && h < sums.heads; ++h) {
    float largest = kMinusInfinity<float>;
    for (Index row = 0; row < sums.rows; ++row) {
      const RowState<float>& state = args.partial.states[row * sums.heads + h];
      if (!is_empty(state)) largest = max_or_nan(largest, state.max);
    }
    store_f32(args.max_logit, 0, h, &largest, 1);
  }
}

}  // namespace weft
