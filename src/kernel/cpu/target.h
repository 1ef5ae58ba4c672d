// A target: the tile functions compiled for one instruction set, in one target_*.cpp each.
#pragma once

#include <span>
#include <string_view>

#include "kernel/cpu/work.h"
#include "weft/kernel.h"

namespace weft::cpu {

// What all tiles of a forward call read.
struct ForwardCall {
  const KernelForwardArgs& args;
  std::span<const Slice> slices;  // of useful_slices()
  float scale, softcap;
};

struct ForwardTile {
  const RowTile& rows;
  const HeadGroup& heads;
  float* scratch;    // forward_scratch() floats of this thread
  float* max_logit;  // [hq] of this thread, natural units; raised here
};

// What all parts of a backward call read; args has out and lse.
struct BackwardCall {
  const KernelBackwardArgs& args;
  std::span<const Slice> slices;  // of useful_slices()
  float scale, softcap;
};

// Floats from one row of the sums of dK or dV to the next.
constexpr Index sum_width(Index dim) { return (dim + 31) / 32 * 32; }

// Stacked rows of a tile: `most`, or fewer where heads are so wide that what the tile keeps of them would fill more
// than it does at widths 256. A row's bits do not depend on it.
constexpr Index stacked_rows(Index most, Index dim_qk, Index dim_v) {
  constexpr Index kWide = 512;
  return max_of(16, min_of(most, most * kWide / max_of(1, dim_qk + dim_v)));
}

// The rows `part` against the keys of its component: writes dQ of those rows; adds to sums of dK and dV in f32.
struct BackwardPart {
  std::span<const Range> blocks;     // of query rows, in order
  std::span<const KeyPlace> slices;  // of the component
  const HeadGroup& heads;
  Index first_sum;  // row of the component's sums that dk and dv begin with
  float* dk;        // [sums of the part, sum_width(dqk)], zero at first
  float* dv;        // [sums of the part, sum_width(dv)]
  float* dsink;     // [hq] of this part, zero at first
  float* scratch;   // backward_scratch() floats of this thread
};

struct Target {
  std::string_view name;  // "neon"
  std::string_view about;
  bool (*runs_here)();  // does this machine have the instructions, and does its system allow them
  Index (*tile_rows)(const ForwardCall& call, Index group);       // query rows in a tile, for the largest group
  Index (*forward_scratch)(const ForwardCall& call, Index rows);  // floats, for `rows` stacked rows
  void (*forward_tile)(const ForwardCall& call, const ForwardTile& tile);
  Index (*block_rows)(const BackwardCall& call, Index group);  // query rows in a block, for the largest group
  Index (*backward_scratch)(const BackwardCall& call, Index rows);
  void (*backward_part)(const BackwardCall& call, const BackwardPart& part);
  void (*store_row)(const TensorView& view, Index row, Index head, const float* from);  // rounded to the view's dtype
};

const Target& scalar_target();
const Target& neon_target();         // aarch64
const Target& neon_bf16_target();    // aarch64
const Target& avx2_target();         // x86_64
const Target& avx512_target();       // x86_64
const Target& avx512_bf16_target();  // x86_64
const Target& amx_target();          // x86_64

// The logit of a head's sink, -inf without one.
float sink_logit_f32(const Sink& sink, Index head);

void forward(const Target& target, const KernelForwardArgs& args);
void backward(const Target& target, const KernelBackwardArgs& args);

}  // namespace weft::cpu
