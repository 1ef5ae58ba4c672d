// Sizes of the backward's tiles, its arguments, and the functions that launch it.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "kernel/cuda/portable/calls.h"
#include "weft/config.h"

namespace weft::cuda::sm90 {

// Where dQ is made and added up: not here; by whoever comes; or tile by tile in a fixed order, for the same bits
// always.
enum class Dq { elsewhere, any_order, in_turn };

// A block is a warpgroup that fetches and two or three that multiply: 64 keys each, or the same 64 (backward_wide.cuh).
// Registers as in ForwardShape.
struct BackwardShape {
  int k, v;         // columns of Q and K, and of V
  int keys;         // of a tile
  int log_rows;     // of a tile of queries: rows times heads
  int stages;       // tiles of Q and dO in shared memory
  int p_buffers;    // of P, where it goes through shared memory as dS does
  int groups;       // that multiply
  int key_buffers;  // two: the next item's keys arrive while this one's are used
  static constexpr int kStepBytes = 32, kItemBytes = 32;
  // Where dQ is added in turn: what a warpgroup makes of a step's, and steps that are known.
  static constexpr int kPartBytes = 16384, kVisits = 8;

  WEFT_HD constexpr int threads() const { return 128 * (1 + groups); }
  WEFT_HD constexpr int fetch_registers() const { return groups == 3 ? 32 : 24; }
  WEFT_HD constexpr int math_registers() const { return groups == 3 ? 160 : 240; }
  WEFT_HD constexpr int rows() const { return 1 << log_rows; }
  WEFT_HD constexpr int ds_buffers() const { return groups; }
  // Of a tile of dQ: each of two warpgroups makes a half, one of three the whole.
  WEFT_HD constexpr int parts_of_tile() const { return groups == 3 ? 1 : 2; }
  // Of a warpgroup, that wait to be added.
  WEFT_HD constexpr int parts() const { return groups == 3 ? 1 : 2; }
  WEFT_HD constexpr int k_bytes() const { return 2 * keys * k; }
  WEFT_HD constexpr int v_bytes() const { return 2 * keys * v; }
  WEFT_HD constexpr int q_bytes() const { return 2 * rows() * k; }
  WEFT_HD constexpr int dout_bytes() const { return 2 * rows() * v; }
  WEFT_HD constexpr int ds_bytes() const { return 2 * keys * rows(); }   // and P's
  WEFT_HD constexpr int statistics_bytes() const { return 4 * rows(); }  // of one kind
  // K, V, stages of Q and dO, dS and P; statistics, steps, the item, barriers.
  WEFT_HD constexpr int tile_bytes() const {
    return key_buffers * (k_bytes() + v_bytes()) + stages * (q_bytes() + dout_bytes()) +
           (ds_buffers() + p_buffers) * ds_bytes();
  }
  WEFT_HD constexpr int shared_bytes() const {
    return tile_bytes() + stages * (2 * statistics_bytes() + kStepBytes) + key_buffers * kItemBytes +
           8 * (3 * key_buffers + 6 * stages + 2 * ds_buffers());
  }
  // With dQ in turn, where P leaves room for it: parts of all warpgroups, visits, barriers.
  WEFT_HD constexpr bool in_turn() const { return p_buffers == 0; }
  WEFT_HD constexpr int parts_at() const { return (shared_bytes() + 127) / 128 * 128; }
  WEFT_HD constexpr int shared_bytes_in_turn() const {
    return parts_at() + groups * parts() * (kPartBytes + 8 * 2) + 8 * kVisits;
  }
};

// Where the statistics of a tile's row lie: a lane of the math has rows 8n + 2q and the one behind, and takes those of
// two n at once.
WEFT_HD constexpr int statistics_at(int row) {
  return (row & ~15) | (row >> 1 & 3) << 2 | (row >> 3 & 1) << 1 | (row & 1);
}

// Warpgroups with one turn a step (backward_one_turn.cuh): they hold rows of two steps and a third is on its way. In
// turn shared memory has no room for that.
WEFT_HD constexpr bool has_one_turn(Width w, Dq dq) { return w == Width::w128 && dq == Dq::any_order; }

WEFT_HD constexpr BackwardShape backward_shape(Width w, Dq dq = Dq::elsewhere) {
  switch (w) {
    case Width::w64:
      return {64, 64, 192, 6, 3, 0, 3, dq == Dq::in_turn ? 1 : 2};
    case Width::w128:
      return {128, 128, 128, 6, has_one_turn(w, dq) ? 3 : 2, 0, 2, 1};
    case Width::w192_128:
      return {192, 128, 64, 6, 2, 2, 2, 1};
    default:
      return {256, 256, 64, 6, 2, 2, 2, 1};
  }
}
// Whose dK and dV of 64 keys fill the registers of both warpgroups (backward_wide.cuh). No room is left for dQ in turn.
WEFT_HD constexpr bool shares_keys(Width w) { return w == Width::w192_128 || w == Width::w256; }

// Query heads that are rows of one tile, a power of two: as many as make the tiles of rows short against the slices,
// whose ends are computed for nothing. No more: heads one after another have less dQ under way than all at once.
constexpr int log_heads_of_tile(int heads_of_group, int rows, Index mean_rows_of_slices) {
  constexpr int kMost = 4, kShort = 32;
  int log = 0;
  while (log < kMost && heads_of_group % (2 << log) == 0 && (rows >> log) * kShort > mean_rows_of_slices) ++log;
  return log;
}

// Tiles of query rows. Slices have in `unused` what brings a row to where tiles lie every `size` rows from 0 on.
struct QueryTiles {
  // [tiles] first row and the one past the last, ~ of it if no slice shows them; null: every `size`, and
  const int2* ranges;
  WorkList list;  // slices of each `listed` tiles
  int listed;
  int tiles;
  int log_size, log_heads;  // rows, and query heads that are rows of one tile: powers of two

  WEFT_HD int size() const { return 1 << log_size; }
  WEFT_HD int heads() const { return 1 << log_heads; }
};

// Tiles of queries that see keys [begin, end) in a slice, both ends included.
struct TileRange {
  int first, last;
};
WEFT_HD constexpr TileRange tiles_seeing(const WorkSlice& s, int begin, int end, int log_size) {
  const int first_key = s.k_begin > begin ? s.k_begin : begin, last_key = (s.k_end < end ? s.k_end : end) - 1;
  const Index first = max_of(s.q_begin, Index{first_key} - s.hi), last = min_of(s.q_end - 1, Index{last_key} - s.lo);
  if (first_key > last_key || first > last) return {0, -1};
  return {static_cast<int>(first + s.unused) >> log_size, static_cast<int>(last + s.unused) >> log_size};
}

// Tiles of keys. On the host they are made in the order in which they are worked on.
struct KeyTiles {
  const int4* items;  // [active] first key, the one past the last, first slice, the one past the last; or null, and
  WorkList list;      // tiles lie every BackwardShape::keys
  int active;         // that may have slices
  const int* order;   // [active · K/V heads] of items: head · active + tile; null: head by head
  // Dq::in_turn: how many additions to a tile of dQ come before that of a slice's visit; the slice's k_first brings the
  // tile's number to its place here. Items of a head are handed out in their order.
  const int* turns;
};
// Query heads of a K/V head: `group` that follow each other, or, if it is 0, as the list says.
struct HeadTiles {
  WorkHeads list;
  int group;
};

struct BackwardCall {
  CUtensorMap q, dout;  // boxes {64, heads, size} of a tile of queries
  CUtensorMap k, v;     // boxes {64, 1, keys}
  QueryTiles rows;
  KeyTiles keys;
  HeadTiles heads;
  int q_rows, k_rows, heads_k;
  int processors;  // blocks at most
  int* counter;    // items handed out so far: 0, and 0 again in the end
  Scores scores;
  float scale;              // d logit / d q·k, but for softcap
  const float* statistics;  // [units, tiles]: lse·log2(e) of all rows (statistics_at), then scale·(dout·out);
                            // +inf and 0 for no row
  float* dq_sums;           // [units, tiles], in the order of registers; null: Dq::elsewhere
  int* additions;           // [units, tiles, parts_of_tile] to a part of them so far; null: not Dq::in_turn
  TensorView dk, dv;
  bool wide_dk, wide_dv;  // of the inputs' dtype, and 8 elements can be stored at once; otherwise f32
  bool add_keys;
  const int2* unseen;  // [unseen_tiles] ranges of keys that become zeros; null: tiles of the list without slices
  int unseen_tiles;    // 0 if dK and dV are added to
  // Launched early. keys_ready: the kernel before is prepare_rows' and was not, so K and V had their numbers before it.
  bool early, keys_ready;
};
void backward_bf16(Width width, const BackwardCall& call, cudaStream_t stream);
void backward_f16(Width width, const BackwardCall& call, cudaStream_t stream);
// The same for widths above 128.
void backward_wide_bf16(Width width, const BackwardCall& call, cudaStream_t stream);
void backward_wide_f16(Width width, const BackwardCall& call, cudaStream_t stream);

// dQ by the owner of its rows, 128 rows times heads: S and dP computed once more, and nothing added by several blocks,
// so that its bits are the same on every run.
struct DqShape {
  int k, v;
  int keys;    // of a step
  int stages;  // tiles of K and V in shared memory
  static constexpr int kRows = 128, kThreads = 384, kStepBytes = 16;
  static constexpr int kFetchRegisters = 24, kMathRegisters = 240;

  WEFT_HD constexpr int q_bytes() const { return 2 * kRows * k; }
  WEFT_HD constexpr int dout_bytes() const { return 2 * kRows * v; }
  WEFT_HD constexpr int k_bytes() const { return 2 * keys * k; }
  WEFT_HD constexpr int v_bytes() const { return 2 * keys * v; }
  WEFT_HD constexpr int tile_bytes() const { return q_bytes() + dout_bytes() + stages * (k_bytes() + v_bytes()); }
  WEFT_HD constexpr int shared_bytes() const { return tile_bytes() + stages * kStepBytes + 8 * (1 + 3 * stages); }
};
WEFT_HD constexpr DqShape dq_shape(Width w) {
  return {backward_shape(w).k, backward_shape(w).v, shares_keys(w) ? 64 : 128, w == Width::w256 ? 1 : 2};
}
// Tiles of the backward that are one here.
WEFT_HD constexpr int tiles_of_dq(Width w) { return DqShape::kRows / backward_shape(w).rows(); }

struct DqItem {
  int begin, end;   // rows
  int first, last;  // slices
  int tile;         // its first one of QueryTiles
  int unused[3] = {};
};
struct DqCall {
  CUtensorMap q, dout, k, v;  // as in BackwardCall, but for DqShape::keys
  QueryTiles rows;
  const DqItem* items;      // [active], or null: rows.list
  const WorkSlice* slices;  // of the items
  int active;
  HeadTiles heads;
  int q_rows, k_rows, heads_q;
  Scores scores;
  float scale;
  const float* statistics;
  TensorView dq;
  bool wide;
};
void dq_bf16(Width width, const DqCall& call, cudaStream_t stream);
void dq_f16(Width width, const DqCall& call, cudaStream_t stream);

// Before: statistics, and zeros in dQ's sums.
struct PrepareCall {
  Source out, dout;
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
void prepare_rows(Width width, const PrepareCall& call, cudaStream_t stream);

// After: dQ's sums, rounded, to their rows.
struct StoreCall {
  QueryTiles rows;
  ConstTensorView lse;
  const float* dq_sums;
  TensorView dq;
  bool wide;  // as in BackwardCall
  int q_rows;
  bool early;
};
void store_rows(Width width, const StoreCall& call, DType inputs, cudaStream_t stream);

// A tensor of any dtype as one of 16 bits, [rows, heads, width], zeros past its columns.
void round_to(const ConstTensorView& from, DType dtype, void* to, Index width, cudaStream_t stream);

}  // namespace weft::cuda::sm90
