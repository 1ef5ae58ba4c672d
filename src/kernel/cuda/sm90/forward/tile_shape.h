// Sizes of the forward's tiles, for host and device.
#pragma once

#include "kernel/cuda/portable/shapes.h"
#include "weft/config.h"

namespace weft::cuda::sm90 {

// A block is a warpgroup that fetches and `groups` that multiply, 64 query rows each. Registers: those of all
// warpgroups together are at most what 65,536 leave each thread at the start (setmaxnreg).
struct ForwardShape {
  int k, v;                // columns of Q and K, and of V
  int groups;              // that multiply
  int keys;                // of a tile
  int k_stages, v_stages;  // tiles of K and of V in shared memory
  int q_buffers;           // two: the next tile's queries arrive while this one's are used
  int early;               // eights of keys whose shares are made before P·V of the last step is awaited
  int fetch_registers, math_registers;
  static constexpr int kStepBytes = 48;

  WEFT_HD constexpr int rows() const { return 64 * groups; }
  WEFT_HD constexpr int threads() const { return 128 * (1 + groups); }
  WEFT_HD constexpr int q_bytes() const { return 2 * rows() * k; }
  WEFT_HD constexpr int k_bytes() const { return 2 * keys * k; }
  WEFT_HD constexpr int v_bytes() const { return 2 * keys * v; }
  WEFT_HD constexpr int state_bytes() const { return 8 * rows(); }  // of a tile's rows, kept by QuerySteps
  // Tiles, then what says what is in them, states, then barriers.
  WEFT_HD constexpr int tile_bytes() const {
    return q_buffers * q_bytes() + k_stages * k_bytes() + v_stages * v_bytes();
  }
  WEFT_HD constexpr int shared_bytes() const {
    return tile_bytes() + k_stages * kStepBytes + q_buffers * state_bytes() +
           8 * (3 * k_stages + 3 * v_stages + 2 * q_buffers);
  }
};

WEFT_HD constexpr ForwardShape forward_shape(Width w) {
  switch (w) {
    case Width::w64:
      return {64, 64, 3, 128, 4, 4, 2, 8, 32, 160};
    case Width::w128:
      return {128, 128, 2, 128, 3, 2, 2, 12, 40, 232};
    case Width::w192_128:
      return {192, 128, 2, 128, 2, 2, 1, 12, 40, 232};
    default:
      return {256, 256, 2, 64, 3, 2, 1, 4, 40, 232};
  }
}
inline constexpr int kSharedBytesOfBlock = 227 * 1024;
static_assert(forward_shape(Width::w64).shared_bytes() <= kSharedBytesOfBlock);
static_assert(forward_shape(Width::w128).shared_bytes() <= kSharedBytesOfBlock);
static_assert(forward_shape(Width::w192_128).shared_bytes() <= kSharedBytesOfBlock);
static_assert(forward_shape(Width::w256).shared_bytes() <= kSharedBytesOfBlock);

// Query heads of a K/V head are rows of one tile: `heads` of them times `rows` rows. Few rows a tile waste little at
// the ends of sequences; below 8 the lists of tiles would grow for nothing.
struct Grouping {
  int heads, rows;
};
WEFT_HD constexpr Grouping grouping(Width w, int heads_of_group) {
  constexpr int kMostHeads = 16;
  int heads = heads_of_group < kMostHeads ? heads_of_group : kMostHeads;
  while (heads_of_group % heads != 0) --heads;
  return {heads, forward_shape(w).rows() / heads};
}

}  // namespace weft::cuda::sm90
