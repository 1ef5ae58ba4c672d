// A target whose bf16 goes by tiles, and f32 and f16 as AVX-512 does.
#pragma once

#include "kernel/cpu/f32_target.h"
#include "kernel/cpu/x86/tile_backward.h"
#include "kernel/cpu/x86/tile_forward.h"

namespace weft::cpu {
namespace {

template <class T>
constexpr Target tile_target(std::string_view name, std::string_view about, bool (*runs_here)()) {
  Target target = bf16_target<TileForward<T>, TileBackward<T>, avx512_target>(name, about, runs_here);
  target.store_row = &store_f32<TileVectors<T>>;
  return target;
}

}  // namespace
}  // namespace weft::cpu
