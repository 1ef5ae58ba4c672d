// Parameters of the kernels, and the functions that launch them.
#pragma once

#include <cuda_runtime_api.h>

#include "kernel/cuda/portable/tile_shape.h"
#include "kernel/cuda/work/work.h"
#include "weft/error.h"
#include "weft/kernel.h"
#include "weft/tensor.h"

namespace weft::cuda {

// Selects by the dtype of a call. A kernel's refusal() keeps other dtypes away.
template <class T>
T select_16bit(DType dtype, T bf16, T f16) {
  switch (dtype) {
    case DType::bf16:
      return bf16;
    case DType::f16:
      return f16;
    case DType::f64:
    case DType::f32:
    case DType::f8_e4m3:
    case DType::f8_e5m2:
      break;
  }
  throw Error("a kernel of bf16 and f16 was given " + std::string(name(dtype)), "use kernel cuda.portable, or cpu");
}
template <class T>
T select_dtype(DType dtype, T bf16, T f16, T f32) {
  return dtype == DType::f32 ? f32 : select_16bit(dtype, bf16, f16);
}

// launch.template operator()<kWidth>() for the width of a call.
template <class Launch>
auto dispatch_width(Width width, const Launch& launch) {
  switch (width) {
    case Width::w64:
      return launch.template operator()<Width::w64>();
    case Width::w128:
      return launch.template operator()<Width::w128>();
    case Width::w192_128:
      return launch.template operator()<Width::w192_128>();
    default:
      return launch.template operator()<Width::w256>();
  }
}

struct InputView {
  ConstTensorView view;
  bool direct;  // 8 elements are aligned for 16-byte loads, and dim is a multiple of 8
  bool same;    // it has the dtype of the computation and can be copied without conversion
};

// logit·log2(e) = scale_log2·x, where x is the score q·k, or tanh(softcap_scale·q·k) if softcap_scale is not 0.
struct ScoreScale {
  float scale_log2, softcap_scale;
};

struct SinkLogits {
  bool given;
  ConstTensorView logits;  // without data: the off-by-one sink, logit 0
};

struct ForwardParams {
  InputView q, k, v;
  WorkList list;  // tiles of query rows
  WorkHeads heads;
  ScoreScale scores;  // scale_log2 > 0, so that the largest score is the largest logit
  float sign;         // 1, or -1 or 0 where the scale is negative or 0: q is multiplied by it
  SinkLogits sink;
  TensorView out, lse;
  PartialView partial;
  unsigned* max_logit;  // [hq] as ordered integers, or null
  int tiles, heads_q;   // upper bounds, as the grid has them
};

struct BackwardParams {
  InputView q, k, v, dout;
  WorkList rows, keys;  // query tiles and key tiles
  WorkHeads heads;
  ScoreScale scores;
  float scale;               // d logit / d q·k, without softcap's slope
  const float2* statistics;  // [hq, padded rows]: {lse·log2(e), dout·out}; +inf for rows without keys
  int padded_rows;
  float* dq_sums;  // [hq, padded rows / kRows] tiles in register layout, or null
  TensorView dq, dk, dv;
  bool add_keys;
  bool large_shared;                           // as in backward_shape, or wide_gradient_stages
  int row_tiles, key_tiles, heads_q, heads_k;  // upper bounds, as the grid has them
};

// Memory-bound passes over rows (passes.cu).
struct StatisticsParams {
  InputView out, dout;
  ConstTensorView lse;
  WorkList list;  // query tiles of `rows` rows
  SinkLogits sink;
  float2* statistics;  // [hq, padded rows], as in BackwardParams
  double* dsink;       // [hq, tiles] terms of the sink's gradient, or null
  int rows, padded_rows, tiles, heads_q;
};
void row_statistics(const StatisticsParams& params, cudaStream_t stream);
void sum_dsink(const double* terms, int tiles, const TensorView& dsink, cudaStream_t stream);
// Rounds dQ's sums and writes them to their rows.
void store_dq(const BackwardParams& params, bool f32, Width width, cudaStream_t stream);
void store_max_logit(const unsigned* ordered, const TensorView& to, cudaStream_t stream);
// out, lse and max_logit (ordered integers, zeroed before) of partial states.
struct FinishParams {
  PartialView partial;
  SinkLogits sink;
  TensorView out, lse;
  unsigned* max_logit;
};
void finish_rows(const FinishParams& params, cudaStream_t stream);

// N: the type of operands (operand_types.cuh).
struct Bf16;
struct F16;
struct F32;
template <class N>
void run_forward(Width width, const ForwardParams& params, cudaStream_t stream);
template <class N>
void run_backward(Width width, const BackwardParams& params, cudaStream_t stream);
// Widths above 256. dK, dV and dQ are computed by the owners of their rows.
template <class N>
void run_wide_forward(bool large_shared, const ForwardParams& params, cudaStream_t stream);
template <class N>
void run_wide_backward(const BackwardParams& params, cudaStream_t stream);
// dQ by the owners of its rows; `rows` has tiles of dq_rows.
template <class N>
void run_dq(Width width, const BackwardParams& params, cudaStream_t stream);

}  // namespace weft::cuda
