// A target whose every dtype is computed in f32.
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

}  // namespace weft::cpu
