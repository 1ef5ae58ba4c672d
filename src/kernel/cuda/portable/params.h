// Arguments of the kernels, and the functions that launch them: one file of kernels a dtype and pass.
#pragma once

#include <cuda_runtime_api.h>

#include "kernel/cuda/portable/tile_shape.h"
#include "kernel/cuda/work/work.h"
#include "weft/attention.h"
#include "weft/error.h"
#include "weft/tensor.h"

namespace weft::cuda {

// What goes with the dtype of a call. A kernel's refusal() keeps all others away.
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

struct InputView {
  ConstTensorView view;
  bool direct;  // 8 elements are aligned for loads of 16 bytes, and rows end with a whole one
  bool same;    // of the dtype that is computed with: can be copied as it is
};

// logit·log2(e) = factor·x, with x the score q·k, or tanh(bend·q·k) if bend is not 0.
struct ScoreScale {
  float scale_log2, softcap_scale;
};

struct SinkLogits {
  bool given;
  ConstTensorView logits;  // none: 0, off by one
};

struct ForwardParams {
  InputView q, k, v;
  WorkList list;  // of query tiles
  WorkHeads heads;
  ScoreScale scores;  // factor > 0, so that the largest score is the largest logit
  float sign;         // q is multiplied by it: 1, or -1 or 0 where the scale is
  SinkLogits sink;
  TensorView out, lse;
  PartialView partial;
  unsigned* max_logit;  // [hq] as ordered integers, or null
  int tiles, heads_q;   // at most
};

struct BackwardParams {
  InputView q, k, v, dout;
  WorkList rows, keys;  // of query tiles and of key tiles
  WorkHeads heads;
  ScoreScale scores;
  float scale;               // d logit / d q·k, but for softcap
  const float2* statistics;  // [hq, padded rows]: lse·log2(e), +inf for rows without keys, and dout·out
  int padded_rows;
  float* dq_sums;  // [hq, padded rows / kRows] tiles in the order of registers, or null
  TensorView dq, dk, dv;
  bool add_keys;
  bool large_shared;                           // as in backward_shape
  int row_tiles, key_tiles, heads_q, heads_k;  // at most
};

// Everything that goes over rows, a few threads each (passes.cu).
struct StatisticsParams {
  InputView out, dout;
  ConstTensorView lse;
  WorkList list;  // of query tiles of `rows`
  SinkLogits sink;
  float2* statistics;  // [hq, padded rows], as in BackwardCall
  double* dsink;       // [hq, tiles] each tile's share, or null
  int rows, padded_rows, tiles, heads_q;
};
void row_statistics(const StatisticsParams& params, cudaStream_t stream);
void sum_dsink(const double* terms, int tiles, const TensorView& dsink, cudaStream_t stream);
// dQ's sums, rounded and scaled, to its rows.
void store_dq(const BackwardParams& params, bool f32, Width width, cudaStream_t stream);
void store_max_logit(const unsigned* ordered, const TensorView& to, cudaStream_t stream);
// out, lse and (ordered, zeroed before) max_logit of partial states.
struct FinishParams {
  PartialView partial;
  SinkLogits sink;
  TensorView out, lse;
  unsigned* max_logit;
};
void finish_rows(const FinishParams& params, cudaStream_t stream);

void forward_bf16(Width width, const ForwardParams& params, cudaStream_t stream);
void forward_f16(Width width, const ForwardParams& params, cudaStream_t stream);
void forward_f32(Width width, const ForwardParams& params, cudaStream_t stream);
void backward_bf16(Width width, const BackwardParams& params, cudaStream_t stream);
void backward_f16(Width width, const BackwardParams& params, cudaStream_t stream);
void backward_f32(Width width, const BackwardParams& params, cudaStream_t stream);
// dQ by the owners of its rows; `rows` are tiles of dq_rows.
void dq_bf16(Width width, const BackwardParams& params, cudaStream_t stream);
void dq_f16(Width width, const BackwardParams& params, cudaStream_t stream);
void dq_f32(Width width, const BackwardParams& params, cudaStream_t stream);

}  // namespace weft::cuda
