// Backward of bf16 by BFMMLA: P and dS are rounded to bf16, everything else is summed in f32.
#pragma once

#include "kernel/cpu/bf16_micro.h"
#include "kernel/cpu/panel.h"
#include "kernel/cpu/tile.h"

namespace weft::cpu {
namespace {

class Bf16Backward : public BackwardEntry<Bf16Backward> {
  friend BackwardEntry<Bf16Backward>;
  // Rows and keys of a tile: P^T and dS^T of 32 KiB each; with the packed rows and keys all of it stays in L2.
  static constexpr Index kRows = 128, kKeys = 128, kQuads = kRows / 4;

  Bf16Backward(const BackwardCall& call, Index rows, float* scratch)
      : call_(call),
        most_(round_up(rows, kRows)),
        wide_k_(round_up(call.args.q.dim, 8)),
        wide_v_(round_up(call.args.v.dim, 8)),
        logits_(call.scale, call.softcap),
        memory_{scratch} {
    const Index widest = max_of(wide_k_, wide_v_);
    dq_ = memory_.take(most_ * wide_k_);
    dk_ = memory_.take(kKeys * wide_k_);
    dv_ = memory_.take(kKeys * wide_v_);
    scores_ = memory_.take(kKeys * kPanel);
    dp_ = memory_.take(kKeys * kPanel);
    minus_lse_ = memory_.take(most_ * 2);
    delta_ = memory_.take(most_ * 2);
    row_ = memory_.take(2 * widest);
    q_rows_ = memory_.take<Bits>(most_ * wide_k_);
    q_columns_ = memory_.take<Bits>(most_ * wide_k_);
    dout_rows_ = memory_.take<Bits>(most_ * wide_v_);
    dout_columns_ = memory_.take<Bits>(most_ * wide_v_);
    k_rows_ = memory_.take<Bits>(kKeys * wide_k_);
    k_columns_ = memory_.take<Bits>(kKeys * wide_k_);
    v_rows_ = memory_.take<Bits>(kKeys * wide_v_);
    ds_by_rows_ = memory_.take<Bits>(kKeys * kPanel);
    p_by_keys_ = memory_.take<Bits>(kKeys * kRows);
    ds_by_keys_ = memory_.take<Bits>(kKeys * kRows);
    copies_ = memory_.take<Bits>(2 * kPanel * widest);
    zeros_ = memory_.take<Bits>(widest);
    tokens_ = memory_.take<Index>(most_);
  }

  void run(const BackwardPart& part, Range block) {
    stack_ = {part.heads.heads, block};
    rows_ = stack_.rows();
    std::memset(zeros_, 0, static_cast<std::size_t>(max_of(wide_k_, wide_v_)) * sizeof(Bits));
    load_block(part);
    for (const KeyPlace& place : part.slices) {
      const Slice& s = call_.slices[static_cast<std::size_t>(place.slice)];
      if (s.q_begin < block.end && s.q_end > block.begin) add_slice(part, s, place.shift);
    }
    for (Index r = 0; r < rows_; ++r) {
      row_of_blocks(dq_ + r / kPanel * kPanel * wide_k_, kPairs, r % kPanel, wide_k_, 1.0f, row_);
      store_f32<Neon>(call_.args.dq, tokens_[r], stack_.head(r), row_);
    }
  }

  void load_block(const BackwardPart& part) {
    const Index quads = most_ / 4, widest = max_of(wide_k_, wide_v_);
    RowPointers q_at(copies_, wide_k_), dout_at(copies_ + kPanel * widest, wide_v_);
    for (Index first = 0; first < round_up(rows_, kRows); first += kPanel) {
      const Bits *q[kPanel], *dout[kPanel];
      for (Index x = 0; x < kPanel; ++x) {
        const Index r = first + x;
        tokens_[r] = stack_.token(r);
        q[x] = dout[x] = zeros_;
        RowStatistics statistics;
        if (r < rows_) {
          const Index h = stack_.head(r);
          q[x] = q_at.row(call_.args.q, tokens_[r], h, x);
          dout[x] = dout_at.row(call_.args.dout, tokens_[r], h, x);
          statistics = row_statistics<Neon>(call_.args, tokens_[r], h, row_, wide_v_, part.dsink);
        }
        const Index lane = r / 2 * 4 + r % 2 * 2;
        minus_lse_[lane] = minus_lse_[lane + 1] = -statistics.lse;
        delta_[lane] = delta_[lane + 1] = statistics.delta;
      }
      pack_rows(q, kPairs, wide_k_, q_rows_ + first * wide_k_);
      pack_rows(dout, kPairs, wide_v_, dout_rows_ + first * wide_v_);
      pack_columns(q, kPanel / 4, wide_k_, q_columns_ + first / 4 * 32, quads);
      pack_columns(dout, kPanel / 4, wide_v_, dout_columns_ + first / 4 * 32, quads);
    }
    std::memset(dq_, 0, static_cast<std::size_t>(most_ * wide_k_) * sizeof(float));
  }

  void add_slice(const BackwardPart& part, const Slice& s, Index shift) {
    const Range tiles = stack_.pieces_of(s, kRows);
    for_each_key_tile(s, stack_, kKeys, [&](Index base, Range keys, Range next) {
      pack_keys(base, keys, part.heads.kv_head);
      prefetch_keys(call_.args, next, part.heads.kv_head);
      std::memset(dk_, 0, static_cast<std::size_t>(kKeys * wide_k_) * sizeof(float));
      std::memset(dv_, 0, static_cast<std::size_t>(kKeys * wide_v_) * sizeof(float));
      for (Index t = tiles.begin; t < tiles.end; ++t) add_tile(s, t * kRows, base, keys);
      const Index sums = base + shift - part.first_sum;  // of the tile's first key
      add_sums(dk_, wide_k_, keys, sums, part.dk, sum_width(call_.args.q.dim));
      add_sums(dv_, wide_v_, keys, sums, part.dv, sum_width(call_.args.v.dim));
    });
  }

  void pack_keys(Index base, Range keys, Index head) {
    const Index widest = max_of(wide_k_, wide_v_);
    RowPointers k_at(copies_, wide_k_), v_at(copies_ + kPanel * widest, wide_v_);
    for (Index j = keys.begin / 8 * 8; j < keys.end; j += 8) {
      const Bits *k[8], *v[8];
      for (Index x = 0; x < 8; ++x) {
        const bool inside = j + x >= keys.begin && j + x < keys.end;
        k[x] = inside ? k_at.row(call_.args.k, base + j + x, head, x) : zeros_;
        v[x] = inside ? v_at.row(call_.args.v, base + j + x, head, x) : zeros_;
      }
      pack_rows(k, 4, wide_k_, k_rows_ + j * wide_k_);
      pack_rows(v, 4, wide_v_, v_rows_ + j * wide_v_);
      pack_columns(k, 2, wide_k_, k_columns_ + j / 4 * 32, kKeys / 4);
    }
  }

  // Rows [row, row + kRows) of the block against the current tile of keys.
  void add_tile(const Slice& s, Index row, Index base, Range keys) {
    Range panels[kRows / kPanel];  // keys that each panel sees, in whole groups of eight
    for (Index n = 0; n < kRows / kPanel; ++n) {
      const Index r = row + n * kPanel;
      panels[n] = {};
      if (r >= rows_) continue;
      const Visibility visible = visibility_of(s, tokens_ + r, min_of(kPanel, rows_ - r), base, keys);
      if (visible.begin >= visible.end) continue;
      panels[n] = {visible.begin / 8 * 8, round_up(visible.end, 8)};
      add_panel(r, n, visible, panels[n]);
    }
    for (Index j = keys.begin / 8 * 8; j < keys.end; j += 8) add_keys(row, j, panels);
  }

  void add_panel(Index r, Index panel, const Visibility& visible, Range keys) {
    const Bits *q = q_rows_ + r * wide_k_, *dout = dout_rows_ + r * wide_v_;
    for (Index j = keys.begin; j < keys.end; j += 8)
      for (Index half = 0; half < kPairs; half += 4) {
        const Index at = (j / 2 * kPairs + half) * 4;
        product_of_pairs<Start::zero>(q + half * 8, kPairs * 8, k_rows_ + j * wide_k_, 32, wide_k_ / 4, scores_ + at,
                                      kPairs, nullptr);
        product_of_pairs<Start::zero>(dout + half * 8, kPairs * 8, v_rows_ + j * wide_v_, 32, wide_v_ / 4, dp_ + at,
                                      kPairs, nullptr);
      }
    logits_.scale_early<Neon>(scores_ + keys.begin * kPanel, scores_ + keys.end * kPanel);
    apply_mask_to_blocks(visible, keys.begin, keys.end, scores_);
    if (call_.softcap > 0)
      gradients<true>(r, panel, keys);
    else
      gradients<false>(r, panel, keys);
    for (Index d = 0; d < wide_k_; d += 8)
      for (Index half = 0; half < kPairs; half += 4)
        product_of_pairs<Start::add>(ds_by_rows_ + (keys.begin / 4 * kPairs + half) * 8, kPairs * 8,
                                     k_columns_ + (d / 8 * (kKeys / 4) + keys.begin / 4) * 32, 32, keys.size() / 4,
                                     dq_ + r * wide_k_ + (d / 2 * kPairs + half) * 4, kPairs, nullptr);
  }

  struct PAndDs {
    float32x4_t p, ds;
  };

  // P = 2^(logit - LSE); dS = P·(dP - delta)·(d logit / d q·k), for one block.
  template <bool kSoftcap>
  WEFT_INLINE PAndDs block(Index pair, Index at) const {
    const float32x4_t score = vld1q_f32(scores_ + at);
    const float32x4_t p =
        exp2_or_zero<Neon>(vfmaq_f32(vld1q_f32(minus_lse_ + pair * 4), score, vdupq_n_f32(logits_.late)));
    float32x4_t slope = vdupq_n_f32(call_.scale);
    if constexpr (kSoftcap) {
      // tanh = score / size; masked scores are -inf, for which a tanh of -1 makes the slope 0
      const float32x4_t one = vdupq_n_f32(1), t = vmaxq_f32(vmulq_n_f32(score, 1 / logits_.size), vdupq_n_f32(-1));
      slope = vmulq_f32(slope, vmulq_f32(vsubq_f32(one, t), vaddq_f32(one, t)));
    }
    return {p, vmulq_f32(vmulq_f32(p, vsubq_f32(vld1q_f32(dp_ + at), vld1q_f32(delta_ + pair * 4))), slope)};
  }

  // Two row pairs and two key pairs at a time, so that the rounded numbers can be stored in both orders.
  template <bool kSoftcap>
  void gradients(Index r, Index panel, Range keys) {
    for (Index j = keys.begin / 2; j < keys.end / 2; j += 2) {
      for (Index i = 0; i < kPairs; i += 2) {
        const Index pair = r / 2 + i, at = (j * kPairs + i) * 4;
        const PAndDs a = block<kSoftcap>(pair, at), b = block<kSoftcap>(pair + 1, at + 4);
        const PAndDs c = block<kSoftcap>(pair, at + kPairs * 4), d = block<kSoftcap>(pair + 1, at + kPairs * 4 + 4);
        Bits* rows = ds_by_rows_ + (j / 2 * kPairs + i) * 8;
        store_by_rows(rows, a.ds, c.ds);
        store_by_rows(rows + 8, b.ds, d.ds);
        const Index by_keys = ((j / 4 * kQuads + panel * (kPanel / 4) + i / 2) * 4 + j % 4) * 8;
        store_by_keys(p_by_keys_ + by_keys, a.p, b.p);
        store_by_keys(p_by_keys_ + by_keys + 8, c.p, d.p);
        store_by_keys(ds_by_keys_ + by_keys, a.ds, b.ds);
        store_by_keys(ds_by_keys_ + by_keys + 8, c.ds, d.ds);
      }
    }
  }

  // dV += P^T·dO and dK += dS^T·Q for eight keys, over the panels from the first to the last that see any of them.
  void add_keys(Index row, Index j, const Range* panels) {
    Index first = kRows / kPanel, last = 0;
    for (Index n = 0; n < kRows / kPanel; ++n) {
      if (panels[n].begin > j || panels[n].end <= j) continue;
      first = min_of(first, n);
      last = n + 1;
    }
    for (Index n = first; n < last; ++n)
      if (panels[n].begin > j || panels[n].end <= j) clear_panel(n, j);
    if (first >= last) return;
    const Index quad = first * (kPanel / 4), steps = (last - first) * (kPanel / 4), quads = most_ / 4;
    const Index from = (j / 8 * kQuads + quad) * 32, block_quad = row / 4 + quad;
    for (Index d = 0; d < wide_v_; d += 8)
      product_of_pairs<Start::add>(p_by_keys_ + from, 32, dout_columns_ + (d / 8 * quads + block_quad) * 32, 32, steps,
                                   dv_ + (d / 2 * (kKeys / 2) + j / 2) * 4, kKeys / 2, nullptr);
    for (Index d = 0; d < wide_k_; d += 8)
      product_of_pairs<Start::add>(ds_by_keys_ + from, 32, q_columns_ + (d / 8 * quads + block_quad) * 32, 32, steps,
                                   dk_ + (d / 2 * (kKeys / 2) + j / 2) * 4, kKeys / 2, nullptr);
  }

  // A panel between others that sees none of eight keys adds nothing to them.
  void clear_panel(Index panel, Index j) {
    const Index at = (j / 8 * kQuads + panel * (kPanel / 4)) * 32;
    std::memset(p_by_keys_ + at, 0, static_cast<std::size_t>(kPanel / 4 * 32) * sizeof(Bits));
    std::memset(ds_by_keys_ + at, 0, static_cast<std::size_t>(kPanel / 4 * 32) * sizeof(Bits));
  }

  // Sums in blocks [column pair][key pair] to rows of plain floats.
  static void add_sums(const float* blocks, Index columns, Range keys, Index first, float* sums, Index stride) {
    for (Index key = keys.begin; key < keys.end; ++key) {
      const float* from = blocks + key / 2 * 4 + key % 2 * 2;
      float* to = sums + (first + key) * stride;
      for (Index d = 0; d < columns; d += 2) {
        to[d] += from[d / 2 * (kKeys / 2) * 4];
        to[d + 1] += from[d / 2 * (kKeys / 2) * 4 + 1];
      }
    }
  }

  const BackwardCall& call_;
  Index most_, wide_k_, wide_v_;
  BlockLogits logits_;
  Dealer memory_;
  Stack stack_ = {};
  Index rows_ = 0;
  float *dq_, *dk_, *dv_, *scores_, *dp_, *minus_lse_, *delta_, *row_;
  Bits *q_rows_, *q_columns_, *dout_rows_, *dout_columns_, *k_rows_, *k_columns_, *v_rows_, *ds_by_rows_, *p_by_keys_,
      *ds_by_keys_, *copies_, *zeros_;
  Index* tokens_;
};

}  // namespace
}  // namespace weft::cpu
