// Tile sizes of the backward kernels, for host and device.
#pragma once

#include "kernel/cuda/sm90/forward/tile_shape.h"

namespace weft::cuda::sm90 {

// How dQ is accumulated: by a kernel of its own that owns dQ's rows; by atomic additions in whatever order blocks come;
// or by additions to each tile in a fixed order, which gives the same bits on every run.
enum class Dq { separate_kernel, atomic, ordered };

// A block has one producer warpgroup and two or three consumer warpgroups, of 64 keys each or both of the same 64 keys
// (wide.cuh).
struct BackwardShape {
  int dim_qk, dim_v;  // columns of Q and K, and of V
  int keys;           // keys of a tile
  int log2_rows;      // rows times heads of a query tile
  int stages;         // pipeline stages: tiles of Q and dO in shared memory
  int p_buffers;      // buffers of P, where P goes through shared memory as dS does
  int consumers;      // consumer warpgroups
  int key_buffers;    // 2: TMA loads the next item's K and V while this item's are in use
  static constexpr int kStepBytes = 32, kItemBytes = 32;
  // Dq::ordered: the part of dQ that a warpgroup computes in a step, and the steps whose order numbers are held.
  static constexpr int kPartBytes = 16384, kVisits = 8;

  WEFT_HD constexpr int threads() const { return 128 * (1 + consumers); }
  // As in ForwardShape::registers_fit: 32 + 3·160 = 4·128, and 24 + 2·240 = 3·168.
  WEFT_HD constexpr int producer_registers() const { return consumers == 3 ? 32 : 24; }
  WEFT_HD constexpr int consumer_registers() const { return consumers == 3 ? 160 : 240; }
  WEFT_HD constexpr int rows() const { return 1 << log2_rows; }
  WEFT_HD constexpr int ds_buffers() const { return consumers; }
  // Of two warpgroups each computes half of a tile of dQ, of three one computes all of it.
  WEFT_HD constexpr int parts_of_tile() const { return consumers == 3 ? 1 : 2; }
  // Parts of dQ of one warpgroup that can wait in shared memory to be added.
  WEFT_HD constexpr int parts() const { return consumers == 3 ? 1 : 2; }
  WEFT_HD constexpr int k_bytes() const { return 2 * keys * dim_qk; }
  WEFT_HD constexpr int v_bytes() const { return 2 * keys * dim_v; }
  WEFT_HD constexpr int q_bytes() const { return 2 * rows() * dim_qk; }
  WEFT_HD constexpr int dout_bytes() const { return 2 * rows() * dim_v; }
  WEFT_HD constexpr int ds_bytes() const { return 2 * keys * rows(); }   // also of a buffer of P
  WEFT_HD constexpr int statistics_bytes() const { return 4 * rows(); }  // of LSE, or of delta
  // Shared memory holds K, V, the stages of Q and dO, dS and P; then statistics, steps, items, mbarriers and the number
  // of tiles of keys.
  WEFT_HD constexpr int tile_bytes() const {
    return key_buffers * (k_bytes() + v_bytes()) + stages * (q_bytes() + dout_bytes()) +
           (ds_buffers() + p_buffers) * ds_bytes();
  }
  WEFT_HD constexpr int shared_bytes() const {
    return tile_bytes() + stages * (2 * statistics_bytes() + kStepBytes) + key_buffers * kItemBytes +
           8 * (3 * key_buffers + 6 * stages + 2 * ds_buffers()) + 8;
  }
  // Dq::ordered adds the parts of dQ, their order numbers and mbarriers, for which there is room up to 128 columns.
  WEFT_HD constexpr bool fits_ordered_dq() const { return dim_qk <= 128; }
  WEFT_HD constexpr int parts_at() const { return (shared_bytes() + 127) / 128 * 128; }
  WEFT_HD constexpr int shared_bytes_ordered() const {
    return parts_at() + consumers * parts() * (kPartBytes + 8 * 2) + 8 * kVisits;
  }
};

// Consumers with one ping-pong slot per step (one_slot.cuh) hold rows of two steps while a third is loaded. Dq::ordered
// leaves no shared memory for a third stage (258 KiB).
WEFT_HD constexpr bool has_one_slot(Width w, Dq dq) { return w == Width::w128 && dq == Dq::atomic; }

WEFT_HD constexpr BackwardShape backward_shape(Width w, Dq dq = Dq::separate_kernel) {
  switch (w) {
    case Width::w64:
      return {.dim_qk = 64,
              .dim_v = 64,
              .keys = 192,
              .log2_rows = 6,
              .stages = 3,
              .p_buffers = 0,
              .consumers = 3,                             // dK and dV of 64 keys take 2·32 of a thread's 160 registers
              .key_buffers = dq == Dq::ordered ? 1 : 2};  // 218 of 227 KiB with two; the parts of dQ take 48 KiB
    case Width::w128:
      return {.dim_qk = 128,
              .dim_v = 128,
              .keys = 128,
              .log2_rows = 6,
              .stages = has_one_slot(w, dq) ? 3 : 2,  // 194 KiB with three, 225 KiB with two and the parts of dQ
              .p_buffers = 0,
              .consumers = 2,  // dK and dV take 2·64 registers, S and dP 2·32
              .key_buffers = 1};
    case Width::w192_128:
      return {.dim_qk = 192,
              .dim_v = 128,
              .keys = 128,  // dK and dV take 96 + 64 registers, S and dP of half a tile's rows 2·16 (half_tiles.cuh)
              .log2_rows = 6,
              .stages = 2,  // 193 KiB
              .p_buffers = 0,
              .consumers = 2,
              .key_buffers = 1};
    default:
      return {.dim_qk = 256,
              .dim_v = 256,
              .keys = 64,
              .log2_rows = 6,
              .stages = 2,  // 225 of 227 KiB
              .p_buffers = 2,
              .consumers = 2,
              .key_buffers = 1};
  }
}
// Widths whose dK and dV of 64 keys fill the registers of both consumers, which then share the keys (wide.cuh).
WEFT_HD constexpr bool shares_keys(Width w) { return w == Width::w256; }

// Where the statistics of a tile's row lie: a consumer lane has rows 8n + 2q and 8n + 2q + 1, and loads those of two n
// with one instruction.
WEFT_HD constexpr int statistics_at(int row) {
  return (row & ~15) | (row >> 1 & 3) << 2 | (row >> 3 & 1) << 1 | (row & 1);
}

// Query heads packed into one tile, a power of two: as many as make tiles short against the slices, whose ends are
// computed for nothing. More would have more dQ in flight than head by head.
constexpr int log2_heads_of_tile(int heads_of_group, int rows, Index mean_rows_of_slices) {
  constexpr int kMax = 4, kShort = 32;
  int log = 0;
  while (log < kMax && heads_of_group % (2 << log) == 0 && (rows >> log) * kShort > mean_rows_of_slices) ++log;
  return log;
}

// The separate dQ kernel: a block owns 128 rows times heads, and recomputes S and dP. No two blocks add to the same
// row, so the bits are the same on every run.
struct DqShape {
  int dim_qk, dim_v;
  int keys;    // keys of a step
  int stages;  // pipeline stages of K and V
  static constexpr int kRows = 128, kThreads = 384, kStepBytes = 16;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;  // 24 + 2·240 = 3·168

  WEFT_HD constexpr int q_bytes() const { return 2 * kRows * dim_qk; }
  WEFT_HD constexpr int dout_bytes() const { return 2 * kRows * dim_v; }
  WEFT_HD constexpr int k_bytes() const { return 2 * keys * dim_qk; }
  WEFT_HD constexpr int v_bytes() const { return 2 * keys * dim_v; }
  WEFT_HD constexpr int tile_bytes() const { return q_bytes() + dout_bytes() + stages * (k_bytes() + v_bytes()); }
  WEFT_HD constexpr int shared_bytes() const { return tile_bytes() + stages * kStepBytes + 8 * (1 + 3 * stages); }
};
WEFT_HD constexpr DqShape dq_shape(Width w) {
  return {
      .dim_qk = backward_shape(w).dim_qk,
      .dim_v = backward_shape(w).dim_v,
      .keys = backward_shape(w).dim_qk > 128 ? 64 : 128,  // S, dP and dS of 128 keys beside dQ fit up to 128 columns
      .stages = w == Width::w256 ? 1 : 2};                // Q and dO take 128 KiB at 256 columns, a stage 64 KiB
}
// Query tiles of the backward that are one tile of the dQ kernel.
WEFT_HD constexpr int dq_tiles_per_item(Width w) { return DqShape::kRows / backward_shape(w).rows(); }

}  // namespace weft::cuda::sm90
