// Host code that the GPU kernels share: a call's arguments in the form that kernels take.
#pragma once

#include <functional>

#include <cuda_runtime_api.h>

#include "cuda/handle_pool.h"
#include "kernel/cuda/portable/params.h"
#include "weft/kernel.h"

namespace weft::cuda {

inline cudaStream_t stream_of(const Place& place) { return static_cast<cudaStream_t>(place.stream); }
inline SinkLogits sink_of(const Sink& sink) { return {sink.kind != Sink::Kind::none, sink.logits}; }

InputView input_view(const ConstTensorView& view, DType compute);
double scale_of(const Attention& attention, Index dim);
// softcap_scale is 0 without softcap, or where the scale is so small that the cap changes nothing.
ScoreScale score_scale_of(double scale, double softcap);
// By which the forward multiplies the queries, so that the largest score is the largest logit.
inline float sign_of(double scale) { return scale > 0 ? 1.0f : scale < 0 ? -1.0f : 0.0f; }
// Error if a grid of tiles x heads cannot be numbered in 32 bits.
void check_grid(Index tiles, Index heads);
// Error if rows, and the rows of a tile past the last one, do not fit in 32 bits.
void check_rows(Index rows);
int sm_count_of(int device);
// A forward whose tiles are `rows` query rows of a head; `run` launches it.
void forward_by_head(const KernelForwardArgs& args, int rows,
                     const std::function<void(const ForwardParams&, cudaStream_t)>& run);
// out and lse, recomputed by `forward` where the caller did not save them.
struct RecomputedForward {
  RecomputedForward(KernelBackwardArgs& args, void (*forward)(const KernelForwardArgs&), cudaStream_t stream);
  StreamArray<float> out, lse;
};
// Null if max_logit is not asked for.
unsigned* zeroed_max_logit(StreamArray<unsigned>& to, const TensorView& max_logit, cudaStream_t stream);

}  // namespace weft::cuda
