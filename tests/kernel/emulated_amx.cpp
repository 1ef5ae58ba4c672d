// The kernels of AMX with tiles that only compute the same, so that they are tested on any machine with AVX-512.
// Another target of this program's registry: not in the library.
#if defined(__x86_64__)

#include "kernel/cpu/x86/tile_target.h"

namespace weft::cpu {
namespace {

struct EmulatedTiles {
  struct Registers {
    bool ready = false;
    __m512i rows[8][16] = {};
  };
  static Registers& registers() {
    thread_local Registers all;
    return all;
  }
  // A use outside of begin and end would be a fault.
  static __m512i* tile(int n) {
    if (!registers().ready) __builtin_trap();
    return registers().rows[n];
  }

  // What a tile held before is nobody's.
  static void begin() {
    std::memset(registers().rows, 0xff, sizeof(Registers::rows));
    registers().ready = true;
  }
  static void end() { registers().ready = false; }

  template <int kTile>
  static void zero() {
    for (int i = 0; i < 16; ++i) tile(kTile)[i] = _mm512_setzero_si512();
  }
  template <int kTile>
  static void load(const void* from, Index stride) {
    for (int i = 0; i < 16; ++i) tile(kTile)[i] = _mm512_loadu_si512(static_cast<const char*>(from) + i * stride);
  }
  template <int kTile>
  static void store(float* to, Index stride) {
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(reinterpret_cast<char*>(to) + i * stride, tile(kTile)[i]);
  }
  // As Intel defines it: the even and the odd numbers are summed apart, and then added to what was there.
  template <int kC, int kA, int kB>
  static void dot() {
    const __m512i *a = tile(kA), *b = tile(kB), high = _mm512_set1_epi32(-65536);
    for (int i = 0; i < 16; ++i) {
      alignas(64) std::uint32_t row[16];
      _mm512_store_si512(row, a[i]);
      __m512 even = _mm512_setzero_ps(), odd = even;
      for (int k = 0; k < 16; ++k) {
        const __m512i x = _mm512_set1_epi32(static_cast<int>(row[k]));
        even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                               _mm512_castsi512_ps(_mm512_slli_epi32(b[k], 16)), even);
        odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, high)),
                              _mm512_castsi512_ps(_mm512_and_si512(b[k], high)), odd);
      }
      __m512i& c = tile(kC)[i];
      c = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(c), _mm512_add_ps(even, odd)));
    }
  }

  static __m512i round_two(__m512 low, __m512 high) {
    alignas(64) float from[32];
    alignas(64) bf16 to[32];
    _mm512_store_ps(from, low);
    _mm512_store_ps(from + 16, high);
    X86Halves::narrow(from, to, 32);
    return _mm512_load_si512(to);
  }
};

}  // namespace

const Target& emulated_amx_target() {
  static constexpr Target target =
      tile_target<EmulatedTiles>("emulated_amx", "AVX-512; bf16 by tiles in plain code", &has_avx512);
  return target;
}

}  // namespace weft::cpu

#endif
