// Tile sizes of the forward kernel, for host and device.
#pragma once

#include "kernel/cuda/portable/tile_shape.h"
#include "weft/config.h"

namespace weft::cuda::sm90 {

// Shared memory that a block can have on Hopper: 228 KiB of an SM less 1 KiB that the system reserves.
inline constexpr int kMaxSharedBytes = 227 * 1024;

// A block has one producer warpgroup and `consumers` consumer warpgroups of 64 query rows each.
struct ForwardShape {
  int dim_qk, dim_v;          // columns of Q and K, and of V
  int consumers;              // consumer warpgroups
  int keys;                   // keys of a tile
  int k_stages, v_stages;     // pipeline stages: tiles of K and of V in shared memory
  int q_stages;               // 2: TMA loads the next tile's queries while this tile's are in use
  int eights_before_pv_wait;  // P of this many groups of 8 keys is computed before waiting for the previous step's P·V
  int producer_registers, consumer_registers;  // setmaxnreg of the two roles
  static constexpr int kStepBytes = 48;

  WEFT_HD constexpr int rows() const { return 64 * consumers; }
  WEFT_HD constexpr int threads() const { return 128 * (1 + consumers); }
  WEFT_HD constexpr int q_bytes() const { return 2 * rows() * dim_qk; }
  WEFT_HD constexpr int k_bytes() const { return 2 * keys * dim_qk; }
  WEFT_HD constexpr int v_bytes() const { return 2 * keys * dim_v; }
  WEFT_HD constexpr int state_bytes() const { return 8 * rows(); }  // row states saved between calls of QuerySteps
  // Shared memory holds the tiles, then a Step per K stage, the row states, and the mbarriers.
  WEFT_HD constexpr int tile_bytes() const {
    return q_stages * q_bytes() + k_stages * k_bytes() + v_stages * v_bytes();
  }
  WEFT_HD constexpr int shared_bytes() const {
    return tile_bytes() + k_stages * kStepBytes + q_stages * state_bytes() +
           8 * (3 * k_stages + 3 * v_stages + 2 * q_stages);
  }
  // setmaxnreg only moves registers between warpgroups, so together they hold at most what the block was launched with:
  // 65,536 over all threads, each thread's number rounded down to a multiple of 8.
  WEFT_HD constexpr bool registers_fit() const {
    return producer_registers + consumers * consumer_registers <= (1 + consumers) * (65536 / threads() / 8 * 8);
  }
  WEFT_HD constexpr bool fits() const { return shared_bytes() <= kMaxSharedBytes && registers_fit(); }
};

WEFT_HD constexpr ForwardShape forward_shape(Width w) {
  switch (w) {
    case Width::w64:
      return {.dim_qk = 64,
              .dim_v = 64,
              .consumers = 3,  // O takes only 32 registers of a thread, so three consumers fit: 192 rows reuse K and V
              .keys = 128,
              .k_stages = 4,  // a tile has just 16 KiB: deep pipelines hide the latency of short steps (176 of 227 KiB)
              .v_stages = 4,
              .q_stages = 2,
              .eights_before_pv_wait = 8,
              .producer_registers = 32,  // 32 + 3·160 = 4·128
              .consumer_registers = 160};
    case Width::w128:
      return {.dim_qk = 128,
              .dim_v = 128,
              .consumers = 2,  // S, P and O take 64 + 32 + 64 registers of a thread: all 160 of three consumers
              .keys = 128,
              .k_stages = 3,  // K stages are 32 KiB: 3 + 2 for K and V and two of Q take 224 of 227 KiB
              .v_stages = 2,
              .q_stages = 2,
              .eights_before_pv_wait = 12,
              .producer_registers = 40,  // 40 + 2·232 = 3·168
              .consumer_registers = 232};
    case Width::w192_128:
      return {.dim_qk = 192,
              .dim_v = 128,
              .consumers = 2,
              .keys = 128,
              .k_stages = 2,  // K stages are 48 KiB, V stages 32 KiB, and Q 48 KiB: no room for a third or a second Q
              .v_stages = 2,
              .q_stages = 1,
              .eights_before_pv_wait = 12,
              .producer_registers = 40,
              .consumer_registers = 232};
    default:
      return {.dim_qk = 256,
              .dim_v = 256,
              .consumers = 2,
              .keys = 64,     // O takes 128 registers of a thread, which leaves S and P of 64 keys
              .k_stages = 3,  // stages are 32 KiB and Q 64 KiB: 224 of 227 KiB
              .v_stages = 2,
              .q_stages = 1,
              .eights_before_pv_wait = 4,
              .producer_registers = 40,
              .consumer_registers = 232};
  }
}
static_assert(forward_shape(Width::w64).fits());
static_assert(forward_shape(Width::w128).fits());
static_assert(forward_shape(Width::w192_128).fits());
static_assert(forward_shape(Width::w256).fits());

// Query heads that share a K/V head are packed into one tile: `heads` heads times `rows` rows. Tiles of few rows waste
// little at the ends of sequences, but below 8 rows the work lists would grow for nothing.
struct Grouping {
  int heads, rows;
};
WEFT_HD constexpr Grouping grouping(Width w, int heads_of_group) {
  constexpr int kMaxHeads = 16;
  int heads = heads_of_group < kMaxHeads ? heads_of_group : kMaxHeads;
  while (heads_of_group % heads != 0) --heads;
  return {heads, forward_shape(w).rows() / heads};
}

}  // namespace weft::cuda::sm90
