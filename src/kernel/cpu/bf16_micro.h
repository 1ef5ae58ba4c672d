// Products of bf16 by BFMMLA: 2 x 4 times 4 x 2 into a block of 2 x 2 floats. Rows, keys and columns go in pairs; sums
// stay in blocks [first pair][second pair] = {a0·b0, a0·b1, a1·b0, a1·b1} until the very end.
#pragma once

#include <arm_neon.h>

#include "kernel/cpu/arm/neon.h"
#include "kernel/cpu/bf16_call.h"
#include "kernel/cpu/elementwise.h"
#include "kernel/cpu/micro.h"
#include "kernel/cpu/panel.h"
#include "weft/tensor.h"

namespace weft::cpu {
namespace {

inline constexpr Index kPairs = kPanel / 2;  // row pairs of a panel

WEFT_INLINE bfloat16x8_t load_bf16(const Bits* p) { return vreinterpretq_bf16_u16(vld1q_u16(p)); }

enum class Start { zero, add, scale };

// c[j·c_stride + i] (blocks) = start + sum over steps of a[step][i]·b[step][j], i, j < 4. A step holds four numbers of
// each row: a_step and b_step elements apart. scale: the old block times factor[i] (block), which shrinks its rows.
// 16 sums and A loaded row by row: as much as g++ keeps in registers.
template <Start kStart>
WEFT_APART void product_of_pairs(const Bits* a, Index a_step, const Bits* b, Index b_step, Index steps, float* c,
                                 Index c_stride, const float* factor) {
  float32x4_t sum[4][4];
  WEFT_UNROLL for (int i = 0; i < 4; ++i) {
    WEFT_UNROLL for (int j = 0; j < 4; ++j) {
      const float* at = c + (j * c_stride + i) * 4;
      if constexpr (kStart == Start::zero)
        sum[i][j] = vdupq_n_f32(0);
      else if constexpr (kStart == Start::add)
        sum[i][j] = vld1q_f32(at);
      else
        sum[i][j] = vmulq_f32(vld1q_f32(at), vld1q_f32(factor + i * 4));
    }
  }
#pragma GCC unroll 1
  for (Index s = 0; s < steps; ++s) {
    bfloat16x8_t y[4];
    WEFT_UNROLL for (int j = 0; j < 4; ++j) y[j] = load_bf16(b + j * 8);
    WEFT_UNROLL for (int i = 0; i < 4; ++i) {
      const bfloat16x8_t x = load_bf16(a + i * 8);
      WEFT_UNROLL for (int j = 0; j < 4; ++j) sum[i][j] = vbfmmlaq_f32(sum[i][j], x, y[j]);
    }
    a += a_step;
    b += b_step;
  }
  WEFT_UNROLL for (int i = 0; i < 4; ++i) {
    WEFT_UNROLL for (int j = 0; j < 4; ++j) vst1q_f32(c + (j * c_stride + i) * 4, sum[i][j]);
  }
}

// Rows as operands whose products sum over columns: to[column / 4][pair][2 rows x 4 columns]. rows[2·pairs], each with
// `wide` columns, a multiple of 8.
WEFT_INLINE void pack_rows(const Bits* const* rows, Index pairs, Index wide, Bits* to) {
  for (Index i = 0; i < pairs; ++i) {
    const Bits *r0 = rows[2 * i], *r1 = rows[2 * i + 1];
    for (Index d = 0; d < wide; d += 8) {
      const uint64x2_t a = vreinterpretq_u64_u16(vld1q_u16(r0 + d)), b = vreinterpretq_u64_u16(vld1q_u16(r1 + d));
      Bits* at = to + (d / 4 * pairs + i) * 8;
      vst1q_u16(at, vreinterpretq_u16_u64(vzip1q_u64(a, b)));
      vst1q_u16(at + pairs * 8, vreinterpretq_u16_u64(vzip2q_u64(a, b)));
    }
  }
}

// Rows as operands whose products sum over rows: to[column / 8][row / 4][column pair][2 columns x 4 rows], `quads`
// groups of four rows; `room` of them lie between one group of columns and the next.
WEFT_INLINE void pack_columns(const Bits* const* rows, Index quads, Index wide, Bits* to, Index room) {
  for (Index s = 0; s < quads; ++s) {
    const Bits* const* r = rows + 4 * s;
    for (Index d = 0; d < wide; d += 8) {
      const uint16x8_t a = vld1q_u16(r[0] + d), b = vld1q_u16(r[1] + d), c = vld1q_u16(r[2] + d),
                       e = vld1q_u16(r[3] + d);
      const uint32x4_t ab0 = vreinterpretq_u32_u16(vzip1q_u16(a, b)), ab1 = vreinterpretq_u32_u16(vzip2q_u16(a, b)),
                       ce0 = vreinterpretq_u32_u16(vzip1q_u16(c, e)), ce1 = vreinterpretq_u32_u16(vzip2q_u16(c, e));
      Bits* at = to + (d / 8 * room + s) * 32;
      vst1q_u16(at, vreinterpretq_u16_u32(vzip1q_u32(ab0, ce0)));
      vst1q_u16(at + 8, vreinterpretq_u16_u32(vzip2q_u32(ab0, ce0)));
      vst1q_u16(at + 16, vreinterpretq_u16_u32(vzip1q_u32(ab1, ce1)));
      vst1q_u16(at + 24, vreinterpretq_u16_u32(vzip2q_u32(ab1, ce1)));
    }
  }
}

// Two neighbouring key blocks of a row pair, rounded: 2 rows x 4 keys.
WEFT_INLINE void store_by_rows(Bits* to, float32x4_t keys01, float32x4_t keys23) {
  const uint32x4_t a = vreinterpretq_u32_bf16(vcvtq_low_bf16_f32(keys01));
  const uint32x4_t b = vreinterpretq_u32_bf16(vcvtq_low_bf16_f32(keys23));
  vst1q_u16(to, vreinterpretq_u16_u32(vzip1q_u32(a, b)));
}
// Two neighbouring row blocks of a key pair, rounded: 2 keys x 4 rows.
WEFT_INLINE void store_by_keys(Bits* to, float32x4_t rows01, float32x4_t rows23) {
  const uint16x8_t both = vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(rows01), rows23));
  vst1q_u16(to, vcombine_u16(vget_low_u16(vuzp1q_u16(both, both)), vget_low_u16(vuzp2q_u16(both, both))));
}

// Row (2·pair + odd) of sums in blocks [column pair][pairs] as plain floats.
WEFT_INLINE void row_of_blocks(const float* blocks, Index pairs, Index row, Index columns, float factor, float* to) {
  const float* from = blocks + row / 2 * 4 + row % 2 * 2;
  for (Index d = 0; d < columns; d += 2) {
    to[d] = from[d / 2 * pairs * 4] * factor;
    to[d + 1] = from[d / 2 * pairs * 4 + 1] * factor;
  }
}

// first and last key of each row pair, as block lanes {row 0, row 0, row 1, row 1}.
WEFT_INLINE float32x4_t pair_lanes(const float* rows, Index pair) {
  const float32x2_t two = vld1_f32(rows + 2 * pair);
  return vcombine_f32(vdup_lane_f32(two, 0), vdup_lane_f32(two, 1));
}

// Scores in blocks [key pair][row pair]: keys that a row does not see become -inf. Keys of whole blocks [begin, end).
WEFT_INLINE void apply_mask_to_blocks(const Visibility& visible, Index begin, Index end, float* scores) {
  const float32x4_t none = vdupq_n_f32(-std::numeric_limits<float>::infinity());
  const float offsets[4] = {0, 1, 0, 1};
  const float32x4_t odd = vld1q_f32(offsets);
  for (Index j = begin; j < end; j += 2) {
    const bool inside = j >= visible.all_begin && j + 2 <= visible.all_end;
    if (inside) continue;
    const float32x4_t key = vaddq_f32(vdupq_n_f32(static_cast<float>(j)), odd);
    for (Index i = 0; i < kPairs; ++i) {
      float* at = scores + (j / 2 * kPairs + i) * 4;
      float32x4_t low = vdupq_n_f32(static_cast<float>(visible.begin)),
                  high = vdupq_n_f32(static_cast<float>(visible.end - 1));
      if (!visible.whole) {
        low = pair_lanes(visible.first, i);
        high = pair_lanes(visible.last, i);
      }
      vst1q_f32(at, Neon::inside_or(vld1q_f32(at), key, low, high, none));
    }
  }
}

}  // namespace
}  // namespace weft::cpu
