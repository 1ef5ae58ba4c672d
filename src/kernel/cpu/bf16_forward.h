// Forward of bf16 by BFMMLA: P is rounded to bf16, everything else is summed in f32.
#pragma once

#include "kernel/cpu/bf16_micro.h"
#include "kernel/cpu/panel.h"
#include "kernel/cpu/tile.h"

namespace weft::cpu {
namespace {

class Bf16Forward : public ForwardEntry<Bf16Forward> {
  friend ForwardEntry<Bf16Forward>;
  static constexpr Index kKeys = 256;  // of a tile; part of a row's arithmetic, so the same for all widths

  Bf16Forward(const ForwardCall& call, Index rows, float* scratch)
      : call_(call),
        rows_(rows),
        panels_(ceil_div(rows, kPanel)),
        wide_k_(round_up(call.args.q.dim, 8)),
        wide_v_(round_up(call.args.v.dim, 8)),
        logits_(call.scale, call.softcap),
        memory_{scratch} {
    const Index widest = max_of(wide_k_, wide_v_);
    out_ = memory_.take(panels_ * kPanel * wide_v_);
    scores_ = memory_.take(kKeys * kPanel);
    max_ = memory_.take(panels_ * kPanel * 2);
    sum_ = memory_.take(panels_ * kPanel * 2);
    factor_ = memory_.take(kPanel * 2);
    row_ = memory_.take(widest);
    q_ = memory_.take<Bits>(panels_ * kPanel * wide_k_);
    p_ = memory_.take<Bits>(kKeys * kPanel);
    k_ = memory_.take<Bits>(kKeys * wide_k_);
    v_ = memory_.take<Bits>(kKeys * wide_v_);
    copies_ = memory_.take<Bits>(kPanel * widest);
    zeros_ = memory_.take<Bits>(widest);
    tokens_ = memory_.take<Index>(panels_ * kPanel);
    live_ = memory_.take<char>(panels_ * kPanel);
  }

  void run(const ForwardTile& tile, const Stack& stack) {
    stack_ = stack;
    begin(tile);
    for (const Index n : tile.rows.slices) attend(call_.slices[static_cast<std::size_t>(n)], tile.heads.kv_head);
    end(tile.max_logit);
  }

  // Where a row's maximum and sum lie in blocks {row 0, row 0, row 1, row 1}.
  static Index lane(Index row) { return row / 2 * 4 + row % 2 * 2; }

  void begin(const ForwardTile& tile) {
    std::memset(zeros_, 0, static_cast<std::size_t>(max_of(wide_k_, wide_v_)) * sizeof(Bits));
    place_rows(call_, tile.rows, stack_, panels_ * kPanel, tokens_, live_);
    for (Index r = 0; r < panels_ * kPanel; ++r) {
      max_[lane(r)] = max_[lane(r) + 1] = kNoMax;
      sum_[lane(r)] = sum_[lane(r) + 1] = 0;
    }
    RowPointers pointers(copies_, wide_k_);
    for (Index p = 0; p < panels_; ++p) {
      const Bits* rows[kPanel];
      for (Index r = 0; r < kPanel; ++r) {
        const Index row = p * kPanel + r;
        rows[r] = live_[row] ? pointers.row(call_.args.q, tokens_[row], stack_.head(row), r) : zeros_;
      }
      pack_rows(rows, kPairs, wide_k_, q_ + p * kPanel * wide_k_);
    }
    std::memset(out_, 0, static_cast<std::size_t>(panels_ * kPanel * wide_v_) * sizeof(float));
    if (call_.args.partial.given()) resume();
  }

  // Loads the partial state that an earlier call left.
  void resume() {
    const PartialView& partial = call_.args.partial;
    for (Index r = 0; r < rows_; ++r) {
      const RowState<float>& state = partial.states[tokens_[r] * partial.sums.heads + stack_.head(r)];
      if (!live_[r] || is_empty(state)) continue;
      max_[lane(r)] = max_[lane(r) + 1] = state.max * kLog2E;
      sum_[lane(r)] = state.sum;
      load_f32<Neon>(partial.sums, tokens_[r], stack_.head(r), row_, wide_v_);
      float* blocks = out_ + r / kPanel * kPanel * wide_v_ + lane(r % kPanel);
      for (Index d = 0; d < wide_v_; ++d) blocks[d / 2 * kPairs * 4 + d % 2] = row_[d];
    }
  }

  void attend(const Slice& s, Index kv_head) {
    const Range panels = stack_.pieces_of(s, kPanel);
    for_each_key_tile(s, stack_, kKeys, [&](Index base, Range keys, Range next) {
      pack_keys(base, keys, kv_head);
      prefetch_keys(call_.args, next, kv_head);
      for (Index p = panels.begin; p < panels.end; ++p) {
        const Visibility visible =
            visibility_of(s, tokens_ + p * kPanel, min_of(kPanel, rows_ - p * kPanel), base, keys);
        if (visible.begin < visible.end) attend_panel(p, visible);
      }
    });
  }

  // Keys in groups of eight: K for sums over columns, V for sums over keys. Keys outside are zeros.
  void pack_keys(Index base, Range keys, Index head) {
    RowPointers k_rows(copies_, wide_k_), v_rows(copies_ + 8 * max_of(wide_k_, wide_v_), wide_v_);
    for (Index j = keys.begin / 8 * 8; j < keys.end; j += 8) {
      const Bits *k[8], *v[8];
      for (Index x = 0; x < 8; ++x) {
        const bool inside = j + x >= keys.begin && j + x < keys.end;
        k[x] = inside ? k_rows.row(call_.args.k, base + j + x, head, x) : zeros_;
        v[x] = inside ? v_rows.row(call_.args.v, base + j + x, head, x) : zeros_;
      }
      pack_rows(k, 4, wide_k_, k_ + j * wide_k_);
      pack_columns(v, 2, wide_v_, v_ + j / 4 * 32, kKeys / 4);
    }
  }

  void attend_panel(Index p, const Visibility& visible) {
    const Index begin = visible.begin / 8 * 8, end = round_up(visible.end, 8);
    const Bits* q = q_ + p * kPanel * wide_k_;
    for (Index j = begin; j < end; j += 8)
      for (Index half = 0; half < kPairs; half += 4)
        product_of_pairs<Start::zero>(q + half * 8, kPairs * 8, k_ + j * wide_k_, 32, wide_k_ / 4,
                                      scores_ + (j / 2 * kPairs + half) * 4, kPairs, nullptr);
    logits_.scale_early<Neon>(scores_ + begin * kPanel, scores_ + end * kPanel);
    apply_mask_to_blocks(visible, begin, end, scores_);
    softmax(p, begin, end);
    float* out = out_ + p * kPanel * wide_v_;
    for (Index d = 0; d < wide_v_; d += 8)
      for (Index half = 0; half < kPairs; half += 4)
        product_of_pairs<Start::scale>(p_ + (begin / 4 * kPairs + half) * 8, kPairs * 8,
                                       v_ + (d / 8 * (kKeys / 4) + begin / 4) * 32, 32, (end - begin) / 4,
                                       out + (d / 2 * kPairs + half) * 4, kPairs, factor_ + half * 4);
  }

  void softmax(Index p, Index begin, Index end) {
    const float32x4_t by = vdupq_n_f32(logits_.late);
    float32x4_t minus_max[kPairs], sum[kPairs];
    for (Index i = 0; i < kPairs; ++i) minus_max[i] = vdupq_n_f32(kNoMax);
    for (Index j = begin / 2; j < end / 2; ++j)
      WEFT_UNROLL for (Index i = 0; i < kPairs; ++i) minus_max[i] =
          vmaxq_f32(minus_max[i], vld1q_f32(scores_ + (j * kPairs + i) * 4));
    for (Index i = 0; i < kPairs; ++i) {
      float* at = max_ + (p * kPairs + i) * 4;
      const float32x4_t old = vld1q_f32(at), seen = vmaxq_f32(minus_max[i], vrev64q_f32(minus_max[i]));
      // A row that has seen nothing keeps that mark, whatever the scale.
      const uint32x4_t any = vmvnq_u32(vcleq_f32(seen, vdupq_n_f32(kNoMax)));  // NaN counts as seen
      const float32x4_t now = vmaxq_f32(old, vbslq_f32(any, vmulq_f32(seen, by), old));
      const float32x4_t shrink = exp2_or_zero<Neon>(vsubq_f32(old, now));
      vst1q_f32(factor_ + i * 4, shrink);
      vst1q_f32(at, now);
      sum[i] = vmulq_f32(vld1q_f32(sum_ + (p * kPairs + i) * 4), shrink);
      minus_max[i] = vnegq_f32(now);
    }
    for (Index j = begin / 4; j < end / 4; ++j) WEFT_UNROLL for (Index i = 0; i < kPairs; ++i) {
        const float* at = scores_ + (2 * j * kPairs + i) * 4;
        const float32x4_t a = exp2_or_zero<Neon>(vfmaq_f32(minus_max[i], vld1q_f32(at), by));
        const float32x4_t b = exp2_or_zero<Neon>(vfmaq_f32(minus_max[i], vld1q_f32(at + kPairs * 4), by));
        sum[i] = vaddq_f32(sum[i], vaddq_f32(a, b));
        store_by_rows(p_ + (j * kPairs + i) * 8, a, b);
      }
    for (Index i = 0; i < kPairs; ++i) vst1q_f32(sum_ + (p * kPairs + i) * 4, sum[i]);
  }

  RowState<float> state(Index row) const {
    if (max_[lane(row)] == kNoMax) return {};
    return {max_[lane(row)] * kLn2, sum_[lane(row)] + sum_[lane(row) + 1]};
  }

  void end(float* max_logit) {
    for (Index r = 0; r < rows_; ++r) {
      end_row<Neon>(call_.args, tokens_[r], stack_.head(r), live_[r], state(r), max_logit, [&](float weight) {
        row_of_blocks(out_ + r / kPanel * kPanel * wide_v_, kPairs, r % kPanel, wide_v_, weight, row_);
        return row_;
      });
    }
  }

  const ForwardCall& call_;
  Index rows_, panels_, wide_k_, wide_v_;
  BlockLogits logits_;
  Dealer memory_;
  Stack stack_ = {};
  float *out_, *scores_, *max_, *sum_, *factor_, *row_;
  Bits *q_, *p_, *k_, *v_, *copies_, *zeros_;
  Index* tokens_;
  char* live_;
};

}  // namespace
}  // namespace weft::cpu
