// Tile sizes, for host and device. Head dimensions are padded to one of five widths.
#pragma once

#include "weft/dtype.h"

namespace weft::cuda {

enum class Width { w64, w128, w192_128, w256, w576_512 };

constexpr int columns_k(Width w) {
  constexpr int kColumns[] = {64, 128, 192, 256, 576};
  return kColumns[static_cast<int>(w)];
}
constexpr int columns_v(Width w) {
  constexpr int kColumns[] = {64, 128, 128, 256, 512};
  return kColumns[static_cast<int>(w)];
}

constexpr Width width_of(DType dtype, Index dim_qk, Index dim_v) {
  const Index widest = dim_qk > dim_v ? dim_qk : dim_v;
  if (widest > 256) return Width::w576_512;
  if (widest <= 64 && dtype != DType::f32) return Width::w64;
  if (widest <= 128) return Width::w128;
  return dim_qk <= 192 && dim_v <= 128 && dtype != DType::f32 ? Width::w192_128 : Width::w256;
}

// An f32 is three bf16 (operand_types.cuh), so it takes three times the memory of a 16-bit element.
struct TileShape {
  int warps;
  int row_blocks;  // blocks of 16 rows of a warp (forward) or of the tile (backward)
  int keys;
  constexpr int threads() const { return 32 * warps; }
};

// Forward: a warp owns 16·row_blocks query rows; accumulators of 32 rows x 128 columns take 128 registers of a thread.
constexpr TileShape forward_shape(bool f32, Width w) {
  if (f32) return w == Width::w256 ? TileShape{2, 1, 16} : TileShape{4, 1, 32};
  return w == Width::w256 ? TileShape{4, 1, 64} : TileShape{4, 2, 64};
}
// Blocks that an SM should hold at once, which limits their registers.
constexpr int forward_blocks(bool f32, Width w) {
  if (f32 || w == Width::w256) return 1;
  return w == Width::w64 ? 3 : 2;
}
constexpr int forward_rows(bool f32, Width w) {
  return 16 * forward_shape(f32, w).row_blocks * forward_shape(f32, w).warps;
}

// Backward: a warp owns 16 keys and iterates over tiles of 16·row_blocks query rows. With large shared memory a block
// has twice the keys: rows are read, and dQ is added to, half as often.
constexpr TileShape backward_shape(bool f32, Width w, bool large_shared) {
  if (f32) return w == Width::w256 ? TileShape{2, 1, 32} : TileShape{4, 1, 64};
  if (w == Width::w128 && large_shared) return TileShape{8, 4, 128};
  return w == Width::w256 ? TileShape{4, 2, 64} : TileShape{4, 4, 64};
}
constexpr int backward_blocks(bool f32, Width w) { return !f32 && w == Width::w64 ? 3 : 1; }
constexpr int backward_rows(bool f32, Width w) { return 16 * backward_shape(f32, w, false).row_blocks; }
// dQ of a tile is computed by all warps: four across its columns, or as many as there are, each with all rows or half
// of them.
constexpr int dq_columns(int warps, Width w) { return columns_k(w) / (warps < 4 ? warps : 4); }
constexpr int dq_rows_of_warp(int warps, int rows) { return warps > 4 ? rows / 2 : rows; }
// Accumulators of dK and dV together fit in the registers up to 128 columns; wider ones take a pass each.
constexpr bool two_passes(Width w) { return columns_k(w) > 128; }

// dQ alone, by the owner of its rows: as the forward with two more matrix products.
constexpr TileShape dq_shape(bool f32, Width w) {
  if (f32) return w == Width::w256 ? TileShape{2, 1, 16} : TileShape{4, 1, 16};
  return w == Width::w256 ? TileShape{4, 1, 32} : TileShape{4, 1, 64};
}
// Loads are not pipelined within a block, so several blocks of an SM must overlap.
constexpr int dq_blocks(bool f32, Width w) { return !f32 && w == Width::w128 ? 3 : 1; }
// Fewer widths, because this path is for reproducibility rather than speed.
constexpr Width dq_width(Width w) { return columns_k(w) <= 128 ? Width::w128 : Width::w256; }
constexpr int dq_rows(bool f32, Width w) { return 16 * dq_shape(f32, w).warps; }

// Bytes of shared memory.
constexpr int parts_of(bool f32) { return f32 ? 3 : 1; }
constexpr int forward_shared(bool f32, Width w) {
  const int rows = forward_rows(f32, w), keys = forward_shape(f32, w).keys;
  return 2 * parts_of(f32) * (rows * columns_k(w) + keys * (columns_k(w) + columns_v(w)));
}
constexpr int dq_shared(bool f32, Width w) {
  const int rows = dq_rows(f32, w), keys = dq_shape(f32, w).keys;
  return 2 * parts_of(f32) * (rows + keys) * (columns_k(w) + columns_v(w));
}
constexpr int kMinPitch = 64;  // columns of a tile in shared memory: the swizzle is over 128 bytes
constexpr int backward_shared(bool f32, Width w, bool large_shared) {
  const int rows = backward_rows(f32, w), keys = backward_shape(f32, w, large_shared).keys;
  const int pitch = rows < kMinPitch ? kMinPitch : rows;
  return 2 * parts_of(f32) * ((rows + keys) * (columns_k(w) + columns_v(w)) + keys * pitch) + 8 * rows + keys;
}

// Above 256 columns (wide_*.cuh) sums of 64 rows fill the registers of eight warps, which share the rows of a block and
// divide columns among them.
constexpr int kWideWarps = 8, kWideThreads = 32 * kWideWarps;
struct WideShape {
  int rows, keys;
};
// With large shared memory (227 KiB) twice the keys a step: what is read for scores is used twice as often.
constexpr WideShape wide_forward_shape(bool f32, bool large_shared) {
  if (f32) return {16, 16};
  return {64, large_shared ? 64 : 32};
}
constexpr int wide_pitch(int columns) { return columns < kMinPitch ? kMinPitch : columns; }
constexpr int kWideColumns = columns_k(Width::w576_512) + columns_v(Width::w576_512);
// Q, K, V, P, and a float for each row and 16 keys.
constexpr int wide_forward_shared(bool f32, bool large_shared) {
  const WideShape s = wide_forward_shape(f32, large_shared);
  return 2 * parts_of(f32) *
             (s.rows * columns_k(Width::w576_512) + s.keys * kWideColumns + s.rows * wide_pitch(s.keys)) +
         4 * s.rows * (s.keys / 16);
}
// Gradients: a block owns so many keys (dK, dV) or query rows (dQ) and iterates over as many rows or keys a step. With
// large shared memory the next step's are loaded meanwhile.
constexpr int wide_gradient_rows(bool f32) { return f32 ? 16 : 32; }
constexpr int wide_gradient_stages(bool f32, bool large_shared) { return !f32 && large_shared ? 2 : 1; }
// Both sides, P and dS as operands, P times the slope of softcap as f32, {lse, delta} of the rows of each stage, live
// keys.
constexpr int wide_gradient_shared(bool f32, bool large_shared) {
  const int rows = wide_gradient_rows(f32), stages = wide_gradient_stages(f32, large_shared);
  return 2 * parts_of(f32) * rows * ((1 + stages) * kWideColumns + 2 * wide_pitch(rows)) + 4 * rows * rows +
         8 * stages * rows + rows;
}

}  // namespace weft::cuda
