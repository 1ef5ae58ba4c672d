// Forward over any SIMD type: S^T = K·Q^T with rows in lanes, so that softmax needs no sum across lanes and P^T is what
// P·V reads. Sums and softmax are f32 whatever the units (rows.h); of pairs, P is rounded to bf16.
#pragma once

#include "kernel/cpu/panel.h"
#include "kernel/cpu/tile.h"

namespace weft::cpu {

template <class S>
class F32Forward : public ForwardEntry<F32Forward<S>> {
 public:
  // K and V tiles share L1 with the scores. Where V is stored in blocks of columns only one block has to fit, so the
  // tile can be longer, and O is loaded and stored less often. Part of a row's arithmetic, so it depends on the widths
  // alone.
  static Index key_tile(Index dim_qk, Index dim_v) {
    if constexpr (S::kBlocked) return 96;
    return S::kPair * (dim_qk + dim_v > 128 ? 32 : 64);
  }

 private:
  friend ForwardEntry<F32Forward>;
  using V = typename S::V;
  using Visible = PanelVisibility<S::kPanel>;
  static constexpr Index kPanel = S::kPanel;
  static constexpr int kVectors = static_cast<int>(kPanel) / S::kLanes;
  static constexpr Index kWidth = ColumnBlocks<S>::kWidth, kLast = ColumnBlocks<S>::kLast;
  static constexpr int kLastVectors = static_cast<int>(kLast) / S::kLanes;

  F32Forward(const ForwardCall& call, Index rows, float* scratch)
      : call_(call),
        rows_(rows),
        panels_(ceil_div(rows, kPanel)),
        units_k_(units_of<S>(call.args.q.dim)),
        wide_v_(round_up(call.args.v.dim, kLast)),
        units_v_(wide_v_ / S::kPair),
        keys_(key_tile(call.args.q.dim, call.args.v.dim)),
        v_blocks_{keys_, units_v_},
        factor_of_scores_(call.softcap > 0 ? call.scale / call.softcap : call.scale * kLog2E),
        memory_{scratch} {
    q_ = memory_.take(panels_ * kPanel * units_k_);
    out_ = memory_.take(panels_ * kPanel * wide_v_);
    scores_ = memory_.take(keys_ * kPanel);
    k_ = memory_.take(keys_ * units_k_);
    v_ = memory_.take(keys_ * units_v_);
    v_rows_ = ColumnBlocks<S>::kInPlace ? v_ : memory_.take(keys_ * units_v_);
    raw_ = memory_.take(kPanel * units_k_);
    max_ = memory_.take(panels_ * kPanel);
    sum_ = memory_.take(panels_ * kPanel);
    factor_ = memory_.take(kPanel);
    tokens_ = memory_.take<Index>(panels_ * kPanel);
    live_ = memory_.take<char>(panels_ * kPanel);
  }

  void run(const ForwardTile& tile, const Stack& stack) {
    stack_ = stack;
    begin(tile);
    for (const Index n : tile.rows.slices) attend(call_.slices[static_cast<std::size_t>(n)], tile.heads.kv_head);
    end(tile.max_logit);
  }

  void begin(const ForwardTile& tile) {
    place_rows(call_, tile.rows, stack_, panels_ * kPanel, tokens_, live_);
    for (Index r = 0; r < panels_ * kPanel; ++r) {
      max_[r] = kNoMax;
      sum_[r] = 0;
    }
    for (Index p = 0; p < panels_; ++p) {
      for (Index r = 0; r < kPanel; ++r) {
        const Index row = p * kPanel + r;
        if (live_[row])
          load_units<S>(call_.args.q, tokens_[row], stack_.head(row), raw_ + r * units_k_, units_k_);
        else
          clear_units(raw_ + r * units_k_, units_k_);
      }
      pack_panel<S>(raw_, units_k_, factor_of_scores_, q_ + p * kPanel * units_k_);
    }
    clear_units(out_, panels_ * kPanel * wide_v_);
    if (call_.args.partial.given()) resume();
  }

  // Loads the partial state that an earlier call left.
  void resume() {
    const PartialView& partial = call_.args.partial;
    for (Index r = 0; r < rows_; ++r) {
      const RowState<float>& state = partial.states[tokens_[r] * partial.sums.heads + stack_.head(r)];
      if (!live_[r] || is_empty(state)) continue;
      max_[r] = state.max * kLog2E;
      sum_[r] = state.sum;
      load_f32<S>(partial.sums, tokens_[r], stack_.head(r), out_ + r * wide_v_, wide_v_);
    }
  }

  void attend(const Slice& s, Index kv_head) {
    const Range panels = stack_.pieces_of(s, kPanel);
    for_each_key_tile(s, stack_, keys_, [&](Index base, Range keys, Range next) {
      const Range all = load_keys<S>(call_.args, base, keys, kv_head, k_, units_k_, v_rows_, units_v_);
      v_blocks_.put(v_rows_ + all.begin * units_v_, all.begin, all.size(), v_);
      // Prefetches a few of the next keys with each panel: all at once, they would delay the loads that are needed now.
      const Index batch = ceil_div(keys_, panels.size());
      for (Index p = panels.begin; p < panels.end; ++p, next.begin += batch) {
        prefetch_keys(call_.args, {next.begin, min_of(next.begin + batch, next.end)}, kv_head);
        const Visible visible =
            visibility_of<kPanel>(s, tokens_ + p * kPanel, min_of(kPanel, rows_ - p * kPanel), base, keys);
        if (visible.begin < visible.end) attend_panel(p, visible);
      }
    });
  }

  void attend_panel(Index p, const Visible& visible) {
    score<S>(k_, units_k_, q_ + p * kPanel * units_k_, factor_of_scores_, visible.begin, visible.end, scores_, kPanel);
    if (call_.softcap > 0) apply_softcap(visible);
    apply_mask<S>(visible, scores_, kPanel);
    const Range keys = whole_units<S>(visible);
    softmax(p, keys);
    for (Index r = 0; r < kPanel; r += 4) {
      const float* f = factor_ + r;
      grew_[r / 4] = f[0] != 1 || f[1] != 1 || f[2] != 1 || f[3] != 1;
    }
    // Of blocks one stays in L1 for all rows.
    const Index whole = wide_v_ / kWidth * kWidth;
    if constexpr (S::kBlocked) {
      for (Index c = 0; c < whole; c += kWidth)
        for (Index r = 0; r < kPanel; r += 4) add_values<S::kPvVectors>(p, r, c, keys);
    } else {
      for (Index r = 0; r < kPanel; r += 4)
        for (Index c = 0; c < whole; c += kWidth) add_values<S::kPvVectors>(p, r, c, keys);
    }
    if (whole < wide_v_)
      for (Index r = 0; r < kPanel; r += 4) add_values<kLastVectors>(p, r, whole, keys);
  }

  // O of 4 rows and kVectors vectors.
  template <int kVectors>
  WEFT_INLINE void add_values(Index p, Index r, Index c, Range keys) {
    // Mostly no row has a new maximum: the factors are 1, and multiplying by 1 changes no bit.
    const auto product =
        grew_[r / 4] ? &product_by_columns<S, kVectors, true> : &product_by_columns<S, kVectors, false>;
    product(scores_ + keys.begin / S::kPair * kPanel + r, kPanel, keys.size() / S::kPair,
            v_ + v_blocks_.at(keys.begin, c), v_blocks_.stride(c), out_ + (p * kPanel + r) * wide_v_ + c, wide_v_,
            factor_ + r);
  }

  // softcap·tanh(x / softcap), in units of log 2; factor_of_scores_ made sure that scores are x / softcap.
  void apply_softcap(const Visible& visible) {
    const V size = S::all(call_.softcap * kLog2E);
    for (float* at = scores_ + visible.begin * kPanel; at < scores_ + visible.end * kPanel; at += S::kLanes)
      S::store(at, S::mul(tanh<S>(S::load(at)), size));
  }

  // Scores become probabilities against the new maximum, [key / kPair][kPanel] units in the same place; factor_ is what
  // the old sums shrink by.
  void softmax(Index p, Range keys) {
    V largest[kVectors], sum[kVectors];
    for (int v = 0; v < kVectors; ++v) largest[v] = S::load(max_ + p * kPanel + v * S::kLanes);
    for (Index j = keys.begin; j < keys.end; ++j)
      WEFT_UNROLL for (int v = 0; v < kVectors; ++v) largest[v] =
          S::max(S::load(scores_ + j * kPanel + v * S::kLanes), largest[v]);
    for (int v = 0; v < kVectors; ++v) {
      float* at = max_ + p * kPanel + v * S::kLanes;
      const V shrink = exp2_or_zero<S>(S::sub(S::load(at), largest[v]));
      S::store(factor_ + v * S::kLanes, shrink);
      S::store(at, largest[v]);
      sum[v] = S::mul(S::load(sum_ + p * kPanel + v * S::kLanes), shrink);
    }
    for (Index j = keys.begin; j < keys.end; j += S::kPair) {
      V e[kVectors][S::kPair];
      WEFT_UNROLL for (int v = 0; v < kVectors; ++v) WEFT_UNROLL for (int x = 0; x < S::kPair; ++x) e[v][x] =
          S::sub(S::load(scores_ + (j + x) * kPanel + v * S::kLanes), largest[v]);
      exp2_or_zero<S, kVectors * S::kPair>(e[0]);
      WEFT_UNROLL for (int v = 0; v < kVectors; ++v) {
        WEFT_UNROLL for (int x = 0; x < S::kPair; ++x) sum[v] = S::add(sum[v], e[v][x]);
        S::store(scores_ + j / S::kPair * kPanel + v * S::kLanes, join<S>(e[v]));
      }
    }
    for (int v = 0; v < kVectors; ++v) S::store(sum_ + p * kPanel + v * S::kLanes, sum[v]);
  }

  RowState<float> state(Index row) const {
    if (max_[row] == kNoMax) return {};
    return {max_[row] * kLn2, sum_[row]};
  }

  void end(float* max_logit) {
    for (Index r = 0; r < rows_; ++r) {
      end_row<S>(call_.args, tokens_[r], stack_.head(r), live_[r], state(r), max_logit, [&](float weight) {
        float* out = out_ + r * wide_v_;
        for (Index i = 0; i < call_.args.v.dim; ++i) out[i] *= weight;
        return out;
      });
    }
  }

  const ForwardCall& call_;
  Index rows_, panels_, units_k_, wide_v_, units_v_, keys_;
  ColumnBlocks<S> v_blocks_;
  float factor_of_scores_;
  Dealer memory_;
  Stack stack_ = {};
  float *q_, *out_, *scores_, *k_, *v_, *v_rows_, *raw_, *max_, *sum_, *factor_;
  Index* tokens_;
  char* live_;
  bool grew_[kPanel / 4] = {};  // four rows, of which one has a new maximum
};

}  // namespace weft::cpu
