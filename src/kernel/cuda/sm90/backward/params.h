// Parameters of the backward kernels, and the functions that launch them.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "kernel/cuda/portable/params.h"
#include "kernel/cuda/sm90/backward/tile_shape.h"

namespace weft::cuda::sm90 {

// Tiles of query rows. WorkSlice::tile_shift is added to a slice's rows before they are divided into tiles of `size`
// rows.
struct QueryTiles {
  const int2* ranges;         // [tiles] {begin, end}, with ~end for rows in no slice
  int tiles;                  // or the most there can be
  const int* count;           // the number of tiles where only the device knows it; null: `tiles`
  int log2_size, log2_heads;  // log2 of the rows and of the query heads packed into a tile

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

// Tiles of BackwardShape::keys keys that have slices, in the order of work.
struct KeyTiles {
  const int4* items;        // [active] {first key, end, first slice, end}
  const WorkSlice* slices;  // of the items
  int active;               // or the most there can be
  const int* count;         // the number of items where only the device knows it; null: `active`
  const int* order;         // [active · K/V heads] order of work: head · active + tile; null: head by head
  // Dq::ordered: the number of additions to a tile of dQ that come before that of a slice's visit, at index k_first of
  // the slice + tile. Items of a head are claimed in this order.
  const int* dq_order;
  // [slices] where an item's slices begin: the part of dK and dV that it computes, or -1 if it computes all of its
  // tile (split_keys.h); null: all items do.
  const int* parts;
};
// Query heads of a K/V head: `group` consecutive heads or, if 0, as the list says.
struct HeadTiles {
  WorkHeads list;
  int group;
};

struct BackwardParams {
  CUtensorMap q, dout;  // TMA boxes {64, heads, size} of a query tile
  CUtensorMap k, v;     // TMA boxes {64, 1, keys}
  QueryTiles rows;
  KeyTiles keys;
  HeadTiles heads;
  int q_rows, k_rows, heads_k;
  int sm_count;  // the most blocks that are launched
  int* counter;  // items claimed so far; 0 before and after every launch
  ScoreScale scores;
  float scale;  // d logit / d q·k, without softcap's slope
  // [units, tiles]: lse·log2(e) of all rows in the order of statistics_at, then scale·(dout·out). Rows that see no key
  // have +inf and 0.
  const float* statistics;
  float* dq_sums;  // [units, tiles] in register layout; null: Dq::separate_kernel
  int* additions;  // [units, tiles, parts_of_tile] additions so far; null: not Dq::ordered
  TensorView dk, dv;
  bool vec8_dk, vec8_dv;  // dK, dV have the inputs' dtype and 8 elements can be stored at once; otherwise they are f32
  bool add_keys;
  float *dk_parts, *dv_parts;  // [parts, K/V heads, keys of a tile] in register layout, of items that compute a part
  const int2* unseen;          // [unseen_tiles] ranges of keys in no slice; {0, 0} after the last
  int unseen_tiles;            // or the most there can be; 0 if dK and dV are added to
  // programmatic: launched with programmatic stream serialization. keys_ready: the previous kernel is prepare_rows,
  // launched without, so K and V were complete before it.
  bool programmatic, keys_ready;
};
template <class N>  // Bf16 or F16
void run_backward(Width width, const BackwardParams& params, cudaStream_t stream);
// The same for Width::w256.
template <class N>
void run_backward_wide(const BackwardParams& params, cudaStream_t stream);

struct DqItem {
  int begin, end;   // range of rows
  int first, last;  // range of slices
  int tile;         // its first tile of QueryTiles
  int padding[3] = {};
};
struct DqParams {
  CUtensorMap q, dout, k, v;  // as in BackwardParams, with DqShape::keys
  QueryTiles rows;
  const DqItem* items;      // [active]
  const WorkSlice* slices;  // slices of the items
  int active;               // or the most there can be
  const int* count;         // the number of items where only the device knows it; null: `active`
  HeadTiles heads;
  int k_rows, heads_q;
  ScoreScale scores;
  float scale;
  const float* statistics;
  TensorView dq;
  bool vec8;
};
template <class N>
void run_dq(Width width, const DqParams& params, cudaStream_t stream);

// Before the backward kernel: computes the statistics and zero-fills dQ's sums.
struct PrepareParams {
  InputView out, dout;
  ConstTensorView lse;
  QueryTiles rows;
  SinkLogits sink;
  float scale;
  float* statistics;
  float* dq_sums;  // or null
  int* additions;  // set to 0; or null
  double* dsink;   // [hq, tiles] or null
  int* counter;    // set to 0; or null
  int heads_q;
};
void prepare_rows(Width width, const PrepareParams& params, cudaStream_t stream);

// After the backward kernel: rounds dQ's sums and writes them to their rows.
struct StoreParams {
  QueryTiles rows;
  ConstTensorView lse;
  const float* dq_sums;
  TensorView dq;
  bool vec8;  // as BackwardParams::vec8_dk
  bool programmatic;
};
void store_rows(Width width, const StoreParams& params, DType inputs, cudaStream_t stream);

// A tile of keys whose rows several items share.
struct SplitTile {
  int begin, end;         // range of keys
  int first_part, parts;  // its parts follow each other
};
// After the backward kernel: adds up the parts of dK and dV.
struct PartSums {
  const SplitTile* tiles;  // [count]
  int count, keys;         // keys of a tile
  int columns_k, columns_v;
  const float *dk_parts, *dv_parts;  // as in BackwardParams
  TensorView dk, dv;
};
void sum_parts(const PartSums& params, int heads_k, cudaStream_t stream);

// Rounds a tensor of any dtype to 16 bits: [rows, heads, width], zeros past its columns.
void round_to(const ConstTensorView& from, DType dtype, void* to, Index width, cudaStream_t stream);

}  // namespace weft::cuda::sm90
