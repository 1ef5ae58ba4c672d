// Products of bf16 by tiles, and how their operands are packed. A class T of tiles has begin and end, zero, load,
// store, dot and round_two, as AmxTiles (amx.h) does; the tests have one that only computes the same.
//
// A packed tile is 1 KiB. The left operand a: 16 rows of 32 numbers that are summed over. The right operand b: 16 pairs
// of the same 32, each with 16 columns. Products are made in blocks of 2 x 2 tiles: two of a, two of b, four sums.
#pragma once

#include <cstring>

#include "kernel/cpu/bf16_call.h"
#include "kernel/cpu/x86/avx512.h"

namespace weft::cpu {
namespace {

inline constexpr Index kUnit = 32;   // rows, keys or columns of a block of tiles, and what one step sums over
inline constexpr Index kTile = 512;  // numbers of a packed tile

// Vectors beside tiles: rows of bf16 are rounded and widened by AVX-512.
template <class T>
struct TileVectors : Avx512 {
  using Avx512::narrow, Avx512::widen;
  static void narrow(const float* from, bf16* to, Index n) {
    Index i = 0;
    for (; i + 32 <= n; i += 32) _mm512_storeu_si512(to + i, T::round_two(load(from + i), load(from + i + 16)));
    Avx512::narrow(from + i, to + i, n - i);
  }
  static void widen(const bf16* from, float* to, Index n) {
    Index i = 0;
    for (; i + 16 <= n; i += 16) {
      const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
      store(to + i, _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)));
    }
    Avx512::widen(from + i, to + i, n - i);
  }
};

// exp2_or_zero in fewer instructions; 0 from -126 on, so that nothing is subnormal, which would be slow.
template <int kCount>
WEFT_INLINE void tile_exp2(__m512* x) {
  __m512 f[kCount], p[kCount];
  __mmask16 large[kCount];
  WEFT_UNROLL for (int i = 0; i < kCount; ++i) {
    large[i] = _mm512_cmp_ps_mask(x[i], _mm512_set1_ps(-126.0f), _CMP_NLE_UQ);  // NaN too
    f[i] = _mm512_reduce_ps(x[i], _MM_FROUND_TO_NEAREST_INT);
  }
  exp2_of_fraction<Avx512, kCount>(f, p);
  WEFT_UNROLL for (int i = 0; i < kCount; ++i) x[i] = _mm512_maskz_scalef_ps(large[i], p[i], _mm512_sub_ps(x[i], f[i]));
}

// This thread's tiles while it lives.
template <class T>
struct TileSession {
  TileSession() { T::begin(); }
  ~TileSession() { T::end(); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
};

// Two tiles of each step: `other` from the first to the second, `step` to those of the next step.
struct Operand {
  const Bits* at;
  Index other, step;
};

// c[32][32] (+)= sum over steps of a·b; between() is called after each step, for other work that fits beside the tiles.
template <class T, bool kAdd, class Between>
WEFT_INLINE void tile_product(Operand a, Operand b, Index steps, float* c, Index c_stride, Between& between) {
  constexpr Index kRow = 64;
  const Index stride = c_stride * static_cast<Index>(sizeof(float));
  float* below = c + 16 * c_stride;
  if constexpr (kAdd) {
    T::template load<0>(c, stride);
    T::template load<1>(c + 16, stride);
    T::template load<2>(below, stride);
    T::template load<3>(below + 16, stride);
  } else {
    T::template zero<0>();
    T::template zero<1>();
    T::template zero<2>();
    T::template zero<3>();
  }
  for (Index s = 0; s < steps; ++s) {
    T::template load<4>(a.at, kRow);
    T::template load<6>(b.at, kRow);
    T::template dot<0, 4, 6>();
    T::template load<7>(b.at + b.other, kRow);
    T::template dot<1, 4, 7>();
    T::template load<5>(a.at + a.other, kRow);
    T::template dot<2, 5, 6>();
    T::template dot<3, 5, 7>();
    a.at += a.step;
    b.at += b.step;
    between();
  }
  T::template store<0>(c, stride);
  T::template store<1>(c + 16, stride);
  T::template store<2>(below, stride);
  T::template store<3>(below + 16, stride);
}

// Does the pieces of `work` evenly over `steps` calls: tiles and vectors compute side by side only if their
// instructions come close together.
template <class Work>
class Pacer {
 public:
  Pacer(Work& work, Index steps) : work_(work), pieces_(work.pieces()), steps_(steps) {}
  void operator()() {
    for (credit_ += pieces_; credit_ >= steps_ && done_ < pieces_; credit_ -= steps_) work_.piece(done_++);
  }
  void finish() {
    while (done_ < pieces_) work_.piece(done_++);
  }

 private:
  Work& work_;
  Index pieces_, steps_, done_ = 0, credit_ = 0;
};
// Nothing to do between steps.
struct NoWork {
  void operator()() const {}
};

WEFT_INLINE __m512i load_bits(const void* from) { return _mm512_loadu_si512(from); }
WEFT_INLINE void store_bits(void* to, __m512i x) { _mm512_storeu_si512(to, x); }

// 16 x 16 numbers of 32 bits.
WEFT_INLINE void transpose16(__m512i* x) {
  __m512i t[16];
  WEFT_UNROLL for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  WEFT_UNROLL for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  constexpr int kEven = 0x88, kOdd = 0xdd;  // lanes 0 and 2, or 1 and 3, of each operand
  WEFT_UNROLL for (int i = 0; i < 4; ++i) {
    const __m512i a = _mm512_shuffle_i32x4(x[i], x[4 + i], kEven), b = _mm512_shuffle_i32x4(x[i], x[4 + i], kOdd);
    const __m512i c = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], kEven);
    const __m512i d = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], kOdd);
    t[i] = _mm512_shuffle_i32x4(a, c, kEven);
    t[4 + i] = _mm512_shuffle_i32x4(b, d, kEven);
    t[8 + i] = _mm512_shuffle_i32x4(a, c, kOdd);
    t[12 + i] = _mm512_shuffle_i32x4(b, d, kOdd);
  }
  WEFT_UNROLL for (int i = 0; i < 16; ++i) x[i] = t[i];
}

// Two rows of 32 numbers as pairs; each half holds columns 4·(2i + half) .. + 3, four groups of four.
WEFT_INLINE void pair_up(__m512i even, __m512i odd, __m512i* halves) {
  halves[0] = _mm512_unpacklo_epi16(even, odd);
  halves[1] = _mm512_unpackhi_epi16(even, odd);
}
// Where a column of 32 lies after pair_up: half·16 + place.
WEFT_INLINE constexpr Index unit_slot(Index row) { return row / 4 % 2 * 16 + row / 8 * 4 + row % 4; }

// Left operand that sums over columns, from 16 rows: to[column / 32] tiles.
WEFT_INLINE void pack_rows(const Bits* const* rows, Index steps, Bits* to) {
  for (Index r = 0; r < 16; ++r)
    for (Index s = 0; s < steps; ++s) store_bits(to + s * kTile + r * 32, load_bits(rows[r] + s * 32));
}

// Right operand that sums over columns, from 16 rows, which become its columns: a tile every `step` numbers.
WEFT_APART void pack_rows_across(const Bits* const* rows, Index steps, Bits* to, Index step) {
  for (Index s = 0; s < steps; ++s) {
    __m512i x[16];
    WEFT_UNROLL for (int r = 0; r < 16; ++r) x[r] = load_bits(rows[r] + s * 32);
    transpose16(x);
    WEFT_UNROLL for (int r = 0; r < 16; ++r) store_bits(to + s * step + r * 32, x[r]);
  }
}

// Left operand that sums over rows, from 32 of them, whose columns become its rows: the tile of 16 columns every `next`
// numbers.
WEFT_APART void pack_columns(const Bits* const* rows, Index wide, Bits* to, Index next) {
  for (Index d = 0; d < wide; d += 32) {
    __m512i halves[2][16];
    WEFT_UNROLL for (int i = 0; i < 16; ++i) {
      __m512i both[2];
      pair_up(load_bits(rows[2 * i] + d), load_bits(rows[2 * i + 1] + d), both);
      halves[0][i] = both[0];
      halves[1][i] = both[1];
    }
    for (Index h = 0; h < 2; ++h) {
      transpose16(halves[h]);
      for (Index i = 0; i < 16; ++i) {
        const Index column = i / 4 * 8 + h * 4 + i % 4;
        store_bits(to + (d + column) / 16 * next + column % 16 * 32, halves[h][i]);
      }
    }
  }
}

// Right operand that sums over rows, from 32 of them: the tile of 16 columns every `next` numbers.
WEFT_APART void pack_pairs(const Bits* const* rows, Index wide, Bits* to, Index next) {
  // Groups of four columns in the order that pair_up turns back.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  for (Index d = 0; d < wide; d += 32) {
    for (Index i = 0; i < 16; ++i) {
      __m512i halves[2];
      pair_up(_mm512_permutexvar_epi64(order, load_bits(rows[2 * i] + d)),
              _mm512_permutexvar_epi64(order, load_bits(rows[2 * i + 1] + d)), halves);
      for (Index h = 0; h < 2; ++h) store_bits(to + (d / 16 + h) * next + i * 32, halves[h]);
    }
  }
}

// Sums of a unit, [column][32 slots of rows], to its rows in the order of slots, or back.
WEFT_APART void rows_of_unit(const float* from, Index wide, float* to) {
  for (Index d = 0; d < wide; d += 16) {
    for (Index h = 0; h < 2; ++h) {
      __m512i x[16];
      WEFT_UNROLL for (int i = 0; i < 16; ++i) x[i] = load_bits(from + (d + i) * kUnit + h * 16);
      transpose16(x);
      WEFT_UNROLL for (int i = 0; i < 16; ++i) store_bits(to + (h * 16 + i) * wide + d, x[i]);
    }
  }
}
WEFT_APART void unit_of_rows(const float* from, Index wide, float* to) {
  for (Index d = 0; d < wide; d += 16) {
    for (Index h = 0; h < 2; ++h) {
      __m512i x[16];
      WEFT_UNROLL for (int i = 0; i < 16; ++i) x[i] = load_bits(from + (h * 16 + i) * wide + d);
      transpose16(x);
      WEFT_UNROLL for (int i = 0; i < 16; ++i) store_bits(to + (d + i) * kUnit + h * 16, x[i]);
    }
  }
}

}  // namespace
}  // namespace weft::cpu
