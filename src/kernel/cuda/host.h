// What the hosts' sides of the GPU kernels share: a call's arguments as kernels take them.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/stream_array.h"
#include "kernel/cuda/portable/params.h"
#include "weft/attention.h"

namespace weft::cuda {

inline cudaStream_t stream_of(const Place& place) { return static_cast<cudaStream_t>(place.stream); }
inline SinkLogits sink_of(const Sink& sink) { return {sink.kind != Sink::Kind::none, sink.logits}; }

InputView input_view(const ConstTensorView& view, DType compute);
double scale_of(const Attention& attention, Index dim);
// A logit in base 2 is factor·score, or factor·tanh(bend·score). No bend: there is no cap, or the scale is so small
// that it caps nothing.
ScoreScale score_scale_of(double scale, double softcap);
// A grid of tiles x heads is numbered in 32 bits.
void check_grid(Index tiles, Index heads);
// Tiles count rows past the last one, in 32 bits.
void check_rows(Index rows);
int sm_count_of(int device);
// out and lse, computed by `forward` where the caller did not keep them.
struct RecomputedForward {
  RecomputedForward(BackwardArgs& args, void (*forward)(const ForwardArgs&), cudaStream_t stream);
  StreamArray<float> out, lse;
};
// Null if max_logit is not asked for.
unsigned* zeroed_max_logit(StreamArray<unsigned>& to, const TensorView& max_logit, cudaStream_t stream);

}  // namespace weft::cuda
