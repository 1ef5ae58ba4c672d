// The tiles of AMX: eight registers of 16 rows of 64 bytes. Written in assembly, because a tile's number is part of the
// instruction and the compilers' own functions do not say that a load reads memory.
#pragma once

#include <immintrin.h>

#include "kernel/cpu/micro.h"

namespace weft::cpu {
namespace {

struct AmxTiles {
  // Between begin() and end() this thread's tiles have their full size. Without end() the system would save 8 KiB at
  // each switch of threads, and whoever comes next would find a configuration that is not theirs.
  static void begin() {
    struct alignas(64) Configuration {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static constexpr Configuration full;
    asm volatile("ldtilecfg %0" : : "m"(full));
  }
  static void end() { asm volatile("tilerelease"); }

  template <int kTile>
  WEFT_INLINE static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  // 16 rows, `stride` bytes from one to the next.
  template <int kTile>
  WEFT_INLINE static void load(const void* from, Index stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  WEFT_INLINE static void store(float* to, Index stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
  }
  // c[16][16] += a[16][32]·b[32][16] in f32; b has two rows in each of its 16: b[2i][n], b[2i + 1][n] side by side.
  template <int kC, int kA, int kB>
  WEFT_INLINE static void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }

  // 32 numbers as bf16, `low` first.
  WEFT_INLINE static __m512i round_two(__m512 low, __m512 high) {
    return __builtin_bit_cast(__m512i, _mm512_cvtne2ps_pbh(high, low));
  }
};

}  // namespace
}  // namespace weft::cpu
