// Targets of the shared kernels: every dtype in f32, or bf16 by kernels of its own.
#pragma once

#include "kernel/cpu/f32_backward.h"
#include "kernel/cpu/f32_forward.h"
#include "kernel/cpu/target.h"

namespace weft::cpu {

template <class S>
constexpr Target f32_target(std::string_view name, std::string_view about, bool (*runs_here)()) {
  return {.name = name,
          .about = about,
          .runs_here = runs_here,
          .tile_rows = &F32Forward<S>::tile_rows,
          .forward_scratch = &F32Forward<S>::scratch,
          .forward_tile = &F32Forward<S>::tile,
          .block_rows = &F32Backward<S>::block_rows,
          .backward_scratch = &F32Backward<S>::scratch,
          .backward_part = &F32Backward<S>::part,
          .store_row = &store_f32<S>};
}

// q, k and v are of one dtype; dout may have another, which f32 can take as it is.
WEFT_INLINE bool in_bf16(const ForwardCall& call) { return call.args.q.dtype == DType::bf16; }
WEFT_INLINE bool in_bf16(const BackwardCall& call) {
  return call.args.q.dtype == DType::bf16 && call.args.dout.dtype == DType::bf16;
}

// A call of bf16 goes to k16, any other to the same member of another target.
template <const Target& (*kElse)(), auto k16, auto kMember, class Call, class... More>
auto by_dtype(const Call& call, More... more) {
  return in_bf16(call) ? k16(call, more...) : (kElse().*kMember)(call, more...);
}

// bf16 by Forward16 and Backward16, everything else by another target, whose code is compiled in its own file. A
// constant as above: code that makes or copies a target would run before runs_here().
template <class Forward16, class Backward16, const Target& (*kElse)()>
constexpr Target bf16_target(std::string_view name, std::string_view about, bool (*runs_here)()) {
  return {.name = name,
          .about = about,
          .runs_here = runs_here,
          .tile_rows = &by_dtype<kElse, &Forward16::tile_rows, &Target::tile_rows>,
          .forward_scratch = &by_dtype<kElse, &Forward16::scratch, &Target::forward_scratch>,
          .forward_tile = &by_dtype<kElse, &Forward16::tile, &Target::forward_tile>,
          .block_rows = &by_dtype<kElse, &Backward16::block_rows, &Target::block_rows>,
          .backward_scratch = &by_dtype<kElse, &Backward16::scratch, &Target::backward_scratch>,
          .backward_part = &by_dtype<kElse, &Backward16::part, &Target::backward_part>,
          .store_row = [](const TensorView& view, Index row, Index head, const float* from) {
            kElse().store_row(view, row, head, from);
          }};
}

}  // namespace weft::cpu
