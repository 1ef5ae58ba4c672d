// Arguments of the Hopper kernels, and the functions that launch them.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "kernel/cuda/portable/params.h"
#include "kernel/cuda/sm90/forward/tile_shape.h"

namespace weft::cuda::sm90 {

// What calls of QuerySteps leave to the next: blocks of a tile and unit, their rows as the math's registers have them.
struct StepAccumulators {
  float* sums;              // or null: no steps
  RowState<float>* states;  // max times log2(e)
  bool first, last;
  bool odd;  // every other call

  WEFT_HD Index block(int unit, int tile, int tiles) const { return static_cast<Index>(unit) * tiles + tile; }
};
// Of a row whose out and lse are written before the last call.
WEFT_HD inline RowState<float> finished_row() { return {0.0f, -1.0f}; }
WEFT_HD inline bool is_finished(const RowState<float>& state) { return state.sum < 0; }

// Keys in parts: a tile that sees keys of several is computed part by part, as if each part were a tile, and the parts
// are merged in their order. Where a part begins depends on the slice alone, so a row's bits do not depend on who
// computes which part.
struct KeySplits {
  static constexpr int kAll = 0x7fffffff;
  int keys = kAll;           // of a part, from the slice's k_first
  int max_splits = 1;        // parts of a tile, at most
  bool concurrent = false;   // by different blocks, the last of which merges; otherwise one after another by one block
  float* sums = nullptr;     // [units, tiles, most] if together, else [blocks], as the math's registers have them
  float4* states = nullptr;  // of every lane's two rows, the same places
  int* arrived = nullptr;    // [units, tiles, warps] parts that are there, if together: 0, and 0 again in the end

  WEFT_HD int items() const { return concurrent ? max_splits : 1; }  // of a tile and unit that are handed out
};

// A tile of query rows as the one who fetches needs it, in one go: its number, rows, slices, and the first of these.
struct alignas(16) ForwardItem {
  int tile;
  int begin, end;   // at most ForwardCall::rows apart
  int first, last;  // slices: [first, last)
  int ends;         // no later call of QuerySteps has keys for it
  int padding[2];
  WorkSlice slice;
};

struct ForwardParams {
  CUtensorMap q, k, v;       // boxes of 64 columns: {64, heads, rows} of a tile of Q, {64, 1, keys} of K and V
  WorkList list;             // of tiles of query rows
  const ForwardItem* items;  // [tiles] in the order of the list; null: tiles lie every `rows`
  const int* kv_head;        // [units] or null: unit·heads / heads_of_group
  int tiles;                 // of the buffer
  int units;                 // tiles side by side: heads_q / heads
  int heads, rows;           // Grouping
  int units_of_group;        // that share a K/V head
  int q_rows, k_rows, heads_q;
  int sm_count;       // blocks at most
  ScoreScale scores;  // factor > 0
  float sign;         // scores are multiplied by it
  SinkLogits sink;
  TensorView out, lse;
  bool vec8_out;  // out is of the inputs' dtype, and 8 elements can be stored at once; otherwise it is f32
  PartialView partial;
  StepAccumulators steps;
  KeySplits splits;
  unsigned* max_logit;  // [hq] as ordered integers, or null
  int* counter;         // tiles, or parts of them, handed out so far: 0, and 0 again in the end
  int opaque_zero = 0;  // which the compiler must not know
};

void forward_bf16(Width width, const ForwardParams& params, cudaStream_t stream);
void forward_f16(Width width, const ForwardParams& params, cudaStream_t stream);
// After the last of QuerySteps: rows of tiles without slices in it, to out and lse.
void finish_steps(Width width, const ForwardParams& params, DType dtype, cudaStream_t stream);

}  // namespace weft::cuda::sm90
