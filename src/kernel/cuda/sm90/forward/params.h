// Parameters of the forward kernels, and the functions that launch them.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "kernel/cuda/portable/params.h"
#include "kernel/cuda/sm90/forward/tile_shape.h"

namespace weft::cuda::sm90 {

// Accumulators that a call of QuerySteps leaves to the next, one block per tile and unit, in the consumers' register
// layout.
struct StepAccumulators {
  float* sums;              // null: the call is not one of QuerySteps
  RowState<float>* states;  // max is scaled by log2(e)
  bool first, last;
  bool odd;  // true in every other call

  WEFT_HD Index block(int unit, int tile, int tiles) const { return static_cast<Index>(unit) * tiles + tile; }
};
// The state of a row whose out and lse were written before the last call.
WEFT_HD inline RowState<float> finished_row() { return {0.0f, -1.0f}; }
WEFT_HD inline bool is_finished(const RowState<float>& state) { return state.sum < 0; }

// Split keys: a tile that sees keys of several splits computes each split as if it were a tile, and the splits are
// merged in order. Where a split begins depends on the slice alone, so a row's bits do not depend on which block
// computes which split.
struct KeySplits {
  static constexpr int kAll = 0x7fffffff;
  int keys = kAll;     // keys of a split, counted from the slice's k_first
  int max_splits = 1;  // the most splits of any tile
  bool concurrent =
      false;  // splits run on different blocks and the last to arrive merges; otherwise one block runs them in order
  float* sums =
      nullptr;  // concurrent: [units, tiles, max_splits], otherwise [blocks]; in the consumers' register layout
  float4* states = nullptr;  // states of every lane's two rows, indexed as sums
  int* arrived =
      nullptr;  // concurrent: [units, tiles, warps] splits that have arrived; 0 before and after every launch

  WEFT_HD int items() const { return concurrent ? max_splits : 1; }  // work items of a tile and unit
};

// A tile of query rows with everything the producer needs, in one aligned struct: rows, slices, and the first slice.
struct alignas(16) ForwardItem {
  int tile;
  int begin, end;   // at most ForwardParams::rows rows
  int first, last;  // range of slices: [first, last)
  int ends;         // nonzero: no later call of QuerySteps has keys for these rows
  int padding[2];
  WorkSlice slice;
};

struct ForwardParams {
  CUtensorMap q, k, v;       // TMA boxes of 64 columns: {64, heads, rows} of Q, {64, 1, keys} of K and V
  const WorkSlice* slices;   // of the items
  const ForwardItem* items;  // [tiles] in the order of work
  const int* kv_head;        // [units]; null: unit·heads / heads_of_group
  int tiles;                 // tiles of query rows, or the most there can be
  const int* tile_count;     // the number of tiles where only the device knows it; null: `tiles`
  int units;                 // groups of `heads` query heads: heads_q / heads
  int heads, rows;           // query heads and rows packed into a tile (Grouping)
  int units_of_group;        // units that share a K/V head
  int k_rows, heads_q;
  int sm_count;       // the most blocks that are launched
  ScoreScale scores;  // scale_log2 > 0
  float sign;         // 1, or -1 or 0 where the scale is negative or 0: scores are multiplied by it
  SinkLogits sink;
  TensorView out, lse;
  bool vec8_out;  // out has the inputs' dtype and 8 elements can be stored at once; otherwise out is f32
  PartialView partial;
  StepAccumulators steps;
  KeySplits splits;
  unsigned* max_logit;  // [hq] as ordered integers, or null
  int* counter;         // work items claimed so far; 0 before and after every launch
  int opaque_zero = 0;  // always 0, but the compiler must not know
};

template <class N>  // Bf16 or F16
void run_forward(Width width, const ForwardParams& params, cudaStream_t stream);
// Widths above 256. v_is_k: V is the first columns of K (same memory).
inline constexpr WideShape kWideSm90Shape = {64, 64};
template <class N>
void run_wide_forward(bool v_is_k, const cuda::ForwardParams& params, cudaStream_t stream);
// After the last call of QuerySteps: writes out and lse of tiles that have no slices in it.
void finish_steps(Width width, const ForwardParams& params, DType dtype, cudaStream_t stream);

}  // namespace weft::cuda::sm90
