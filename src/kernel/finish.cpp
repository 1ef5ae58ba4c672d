// finish_partial: partial states become out, lse and max_logit.
#include <vector>

#include "index.h"
#include "kernel/check_args.h"
#include "kernel/cuda_kernels.h"
#include "kernel/each_row.h"
#include "weft/error.h"

namespace weft {
namespace {

// factor·from[0..dim), rounded once.
void store(const TensorView& view, Index row, Index head, const float* from, float factor) {
  store_f32(view, row, head, from, factor);
}
void store(const TensorView& view, Index row, Index head, const double* from, double factor) {
  with_type(view.dtype, [&]<class T>(std::type_identity<T>) {
    T* to = view.at<T>(row, head);
    for (Index i = 0; i < view.dim; ++i) to[i] = static_cast<T>(from[i] * factor);
  });
}

template <class T>
void finish_row(const FinishArgs& args, const RowState<T>* states, const std::vector<T>& sinks, Index row,
                const std::vector<T>& nothing) {
  const TensorView& sums = args.partial.sums;
  for (Index h = 0; h < sums.heads; ++h) {
    const RowState<T>& state = states[row * sums.heads + h];
    const FinishedRow<T> done = finish(state, sinks[at(h)]);
    if (is_empty(state))
      store(args.out, row, h, nothing.data(), T{0});
    else
      store(args.out, row, h, sums.at<T>(row, h), done.weight);
    if (args.lse.given()) store(args.lse, row, h, &done.lse, T{1});
  }
}

template <class T>
void finish_rows(const FinishArgs& args, const RowState<T>* states) {
  const TensorView& sums = args.partial.sums;
  std::vector<T> sinks, nothing(at(sums.dim), T{0});
  for (Index h = 0; h < sums.heads; ++h) sinks.push_back(static_cast<T>(sink_logit(args.sink, h)));
  each_row(sums, [&](Index row) { finish_row(args, states, sinks, row, nothing); });
  for (Index h = 0; args.max_logit.given() && h < sums.heads; ++h) {
    T largest = kMinusInfinity<T>;
    for (Index row = 0; row < sums.rows; ++row) {
      const RowState<T>& state = states[row * sums.heads + h];
      if (!is_empty(state)) largest = max_or_nan(largest, state.max);
    }
    store(args.max_logit, 0, h, &largest, T{1});
  }
}

}  // namespace

void finish_partial(const FinishArgs& args) {
  if (!args.partial.given())
    throw Error("finish_partial without partial states", "give the partial of the attend calls");
  const TensorView& sums = args.partial.sums;
  check_outputs(args, sums.rows, sums.heads, sums.dim);
  if (args.place.kind == DeviceKind::cuda) {
#ifdef WEFT_WITH_CUDA
    cuda::finish_partial(args);
    return;
#else
    throw Error("finish_partial of states on a GPU in a build without CUDA", "build with WEFT_CUDA=ON");
#endif
  }
  if (sums.dtype == DType::f64)
    finish_rows(args, args.partial.states_f64);
  else
    finish_rows(args, args.partial.states);
}

}  // namespace weft
