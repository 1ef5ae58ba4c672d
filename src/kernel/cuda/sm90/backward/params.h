// Sizes of the backward's tiles, its arguments, and the functions that launch it.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "kernel/cuda/portable/params.h"
#include "kernel/cuda/sm90/backward/tile_shape.h"

namespace weft::cuda::sm90 {

// Tiles of query rows. Slices have in `unused` what brings a row to where tiles lie every `size` rows from 0 on.
struct QueryTiles {
  // [tiles] first row and the one past the last, ~ of it if no slice shows them; null: every `size`, and
  const int2* ranges;
  WorkList list;  // slices of each `listed` tiles
  int listed;
  int tiles;
  int log2_size, log2_heads;  // rows, and query heads that are rows of one tile: powers of two

  WEFT_HD int size() const { return 1 << log2_size; }
  WEFT_HD int heads() const { return 1 << log2_heads; }
};

// Tiles of queries that see keys [begin, end) in a slice, both ends included.
struct TileRange {
  int first, last;
};
WEFT_HD constexpr TileRange tiles_seeing(const WorkSlice& s, int begin, int end, int log2_size) {
  const int first_key = s.k_begin > begin ? s.k_begin : begin, last_key = (s.k_end < end ? s.k_end : end) - 1;
  const Index first = max_of(s.q_begin, Index{first_key} - s.hi), last = min_of(s.q_end - 1, Index{last_key} - s.lo);
  if (first_key > last_key || first > last) return {0, -1};
  return {static_cast<int>(first + s.tile_shift) >> log2_size, static_cast<int>(last + s.tile_shift) >> log2_size};
}

// Tiles of keys. On the host they are made in the order in which they are worked on.
struct KeyTiles {
  const int4* items;  // [active] first key, the one past the last, first slice, the one past the last; or null, and
  WorkList list;      // tiles lie every BackwardShape::keys
  int active;         // that may have slices
  const int* order;   // [active · K/V heads] of items: head · active + tile; null: head by head
  // Dq::in_turn: how many additions to a tile of dQ come before that of a slice's visit; the slice's k_first brings the
  // tile's number to its place here. Items of a head are handed out in their order.
  const int* dq_order;
};
// Query heads of a K/V head: `group` that follow each other, or, if it is 0, as the list says.
struct HeadTiles {
  WorkHeads list;
  int group;
};

struct BackwardParams {
  CUtensorMap q, dout;  // boxes {64, heads, size} of a tile of queries
  CUtensorMap k, v;     // boxes {64, 1, keys}
  QueryTiles rows;
  KeyTiles keys;
  HeadTiles heads;
  int q_rows, k_rows, heads_k;
  int sm_count;  // blocks at most
  int* counter;  // items handed out so far: 0, and 0 again in the end
  ScoreScale scores;
  float scale;              // d logit / d q·k, but for softcap
  const float* statistics;  // [units, tiles]: lse·log2(e) of all rows (statistics_at), then scale·(dout·out);
                            // +inf and 0 for no row
  float* dq_sums;           // [units, tiles], in the order of registers; null: Dq::elsewhere
  int* additions;           // [units, tiles, parts_of_tile] to a part of them so far; null: not Dq::in_turn
  TensorView dk, dv;
  bool vec8_dk, vec8_dv;  // of the inputs' dtype, and 8 elements can be stored at once; otherwise f32
  bool add_keys;
  const int2* unseen;  // [unseen_tiles] ranges of keys that become zeros; null: tiles of the list without slices
  int unseen_tiles;    // 0 if dK and dV are added to
  // Launched early. keys_ready: the kernel before is prepare_rows' and was not, so K and V had their numbers before it.
  bool programmatic, keys_ready;
};
void backward_bf16(Width width, const BackwardParams& params, cudaStream_t stream);
void backward_f16(Width width, const BackwardParams& params, cudaStream_t stream);
// The same for widths above 128.
void backward_wide_bf16(Width width, const BackwardParams& params, cudaStream_t stream);
void backward_wide_f16(Width width, const BackwardParams& params, cudaStream_t stream);

struct DqItem {
  int begin, end;   // rows
  int first, last;  // slices
  int tile;         // its first one of QueryTiles
  int padding[3] = {};
};
struct DqParams {
  CUtensorMap q, dout, k, v;  // as in BackwardCall, but for DqShape::keys
  QueryTiles rows;
  const DqItem* items;      // [active], or null: rows.list
  const WorkSlice* slices;  // of the items
  int active;
  HeadTiles heads;
  int q_rows, k_rows, heads_q;
  ScoreScale scores;
  float scale;
  const float* statistics;
  TensorView dq;
  bool wide;
};
void dq_bf16(Width width, const DqParams& params, cudaStream_t stream);
void dq_f16(Width width, const DqParams& params, cudaStream_t stream);

// Before: statistics, and zeros in dQ's sums.
struct PrepareParams {
  InputView out, dout;
  ConstTensorView lse;
  QueryTiles rows;
  SinkLogits sink;
  float scale;
  float* statistics;
  float* dq_sums;  // or null
  int* additions;  // become 0; or null
  double* dsink;   // [hq, tiles] or null
  int* counter;    // becomes 0; or null
  int q_rows, heads_q;
};
void prepare_rows(Width width, const PrepareParams& params, cudaStream_t stream);

// After: dQ's sums, rounded, to their rows.
struct StoreParams {
  QueryTiles rows;
  ConstTensorView lse;
  const float* dq_sums;
  TensorView dq;
  bool wide;  // as in BackwardCall
  int q_rows;
  bool programmatic;
};
void store_rows(Width width, const StoreParams& params, DType inputs, cudaStream_t stream);

// A tensor of any dtype as one of 16 bits, [rows, heads, width], zeros past its columns.
void round_to(const ConstTensorView& from, DType dtype, void* to, Index width, cudaStream_t stream);

}  // namespace weft::cuda::sm90
