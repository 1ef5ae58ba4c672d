// Forward over any SIMD type: S^T = K·Q^T with rows in lanes, so that softmax needs no sum across lanes and P^T is what
// P·V reads. Sums and softmax are f32 whatever the units (units.h); of pairs, P is rounded to bf16.
#pragma once

#include "kernel/cpu/elementwise.h"
#include "kernel/cpu/panel.h"
#include "kernel/cpu/rows.h"
#include "kernel/cpu/target.h"
#include "weft/state.h"

namespace weft::cpu {

template <class S>
class F32Forward {
 public:
  // 512 stacked rows: Q and O panels fill half of a 1 MiB L2 at dim 128, and K/V are copied once for all of them.
  static Index tile_rows(const ForwardCall&, Index group) { return max_of(1, 512 / group); }
  // K and V tiles share L1 with the scores; part of a row's arithmetic, so it depends on the widths alone.
  static Index key_tile(Index dim_qk, Index dim_v) { return S::kPair * (dim_qk + dim_v > 128 ? 32 : 64); }

  static Index scratch(const ForwardCall& call, Index rows) {
    const F32Forward sizes(call, rows, nullptr);
    return sizes.used_;
  }

  static void tile(const ForwardCall& call, const ForwardTile& tile) {
    const Index rows = tile.rows.rows.size() * static_cast<Index>(tile.heads.heads.size());
    F32Forward(call, rows, tile.scratch).run(tile);
  }

 private:
  using V = typename S::V;
  static constexpr int kVectors = static_cast<int>(kPanel) / S::kLanes;

  F32Forward(const ForwardCall& call, Index rows, float* scratch)
      : call_(call),
        rows_(rows),
        panels_(ceil_div(rows, kPanel)),
        units_k_(units_of<S>(call.args.q.dim)),
        wide_v_(round_up(call.args.v.dim, S::kPvVectors * S::kLanes)),
        units_v_(wide_v_ / S::kPair),
        keys_(key_tile(call.args.q.dim, call.args.v.dim)),
        factor_of_scores_(call.softcap > 0 ? call.scale / call.softcap : call.scale * kLog2E),
        scratch_(scratch) {
    q_ = take(panels_ * kPanel * units_k_);
    out_ = take(panels_ * kPanel * wide_v_);
    scores_ = take(keys_ * kPanel);
    k_ = take(keys_ * units_k_);
    v_ = take(keys_ * units_v_);
    v_rows_ = S::kPair == 1 ? v_ : take(keys_ * units_v_);
    raw_ = take(kPanel * units_k_);
    max_ = take(panels_ * kPanel);
    sum_ = take(panels_ * kPanel);
    factor_ = take(kPanel);
    tokens_ = reinterpret_cast<Index*>(take(2 * panels_ * kPanel));
    live_ = reinterpret_cast<char*>(take(panels_ * kPanel));
  }

  // A multiple of 64 bytes each, so that everything is aligned if the scratch is.
  float* take(Index floats) {
    float* at = scratch_ ? scratch_ + used_ : nullptr;
    used_ += round_up(floats, 16);
    return at;
  }

  void run(const ForwardTile& tile) {
    begin(tile);
    for (const Index n : tile.rows.slices) attend(call_.slices[static_cast<std::size_t>(n)], tile);
    end(tile);
  }

  Index head(const ForwardTile& tile, Index row) const {
    return tile.heads.heads[static_cast<std::size_t>(row) % tile.heads.heads.size()];
  }

  void begin(const ForwardTile& tile) {
    const Index group = static_cast<Index>(tile.heads.heads.size());
    for (Index r = 0; r < panels_ * kPanel; ++r) {
      tokens_[r] = tile.rows.rows.begin + min_of(r, rows_ - 1) / group;
      live_[r] = 0;
      max_[r] = kNoMax;
      sum_[r] = 0;
    }
    for (const Index n : tile.rows.slices) {
      const Slice& s = call_.slices[static_cast<std::size_t>(n)];
      for (Index r = 0; r < rows_; ++r) live_[r] |= tokens_[r] >= s.q_begin && tokens_[r] < s.q_end;
    }
    for (Index p = 0; p < panels_; ++p) {
      for (Index r = 0; r < kPanel; ++r) {
        const Index row = p * kPanel + r;
        if (live_[row])
          load_units<S>(call_.args.q, tokens_[row], head(tile, row), raw_ + r * units_k_, units_k_);
        else
          clear_units(raw_ + r * units_k_, units_k_);
      }
      pack_panel<S>(raw_, units_k_, factor_of_scores_, q_ + p * kPanel * units_k_);
    }
    clear_units(out_, panels_ * kPanel * wide_v_);
    if (call_.args.partial.given()) resume(tile);
  }

  // Goes on where an earlier call left a row.
  void resume(const ForwardTile& tile) {
    const PartialView& partial = call_.args.partial;
    for (Index r = 0; r < rows_; ++r) {
      const RowState<float>& state = partial.states[tokens_[r] * partial.sums.heads + head(tile, r)];
      if (!live_[r] || is_empty(state)) continue;
      max_[r] = state.max * kLog2E;
      sum_[r] = state.sum;
      load_f32<S>(partial.sums, tokens_[r], head(tile, r), out_ + r * wide_v_, wide_v_);
    }
  }

  void attend(const Slice& s, const ForwardTile& tile) {
    const Range rows{max_of(s.q_begin, tile.rows.rows.begin), min_of(s.q_end, tile.rows.rows.end)};
    const Range seen{max_of(s.k_begin, shift_bound(s.lo, rows.begin)), min_of(s.k_end, shift_bound(s.hi, rows.end))};
    const Index group = static_cast<Index>(tile.heads.heads.size());
    const Index first_panel = (rows.begin - tile.rows.rows.begin) * group / kPanel;
    const Index last_panel = ((rows.end - tile.rows.rows.begin) * group - 1) / kPanel;
    // Tiles count from k_begin whoever computes, so a row always sums in the same groups.
    for (Index base = s.k_begin + (seen.begin - s.k_begin) / keys_ * keys_; base < seen.end; base += keys_) {
      const Range keys{max_of(0, seen.begin - base), min_of(keys_, seen.end - base)};
      load_keys(base, keys, tile.heads.kv_head);
      // A few of the next keys a panel: asked for all at once they would hold up the loads that are waited for.
      const Index next_end = min_of(seen.end, base + 2 * keys_), share = ceil_div(keys_, last_panel - first_panel + 1);
      Index next = base + keys_;
      for (Index p = first_panel; p <= last_panel; ++p, next += share) {
        prefetch_rows(call_.args.k, next, min_of(next + share, next_end), tile.heads.kv_head);
        prefetch_rows(call_.args.v, next, min_of(next + share, next_end), tile.heads.kv_head);
        const Sight sight = sight_of(s, tokens_ + p * kPanel, min_of(kPanel, rows_ - p * kPanel), base, keys);
        if (sight.begin < sight.end) attend_panel(p, sight);
      }
    }
  }

  void load_keys(Index base, Range keys, Index head) {
    const Index from = keys.begin / S::kKeys * S::kKeys, to = round_up(keys.end, S::kKeys);
    for (Index j = from; j < to; ++j) {
      float *k = k_ + j * units_k_, *v = v_rows_ + j * units_v_;
      if (j >= keys.begin && j < keys.end) {
        load_units<S>(call_.args.k, base + j, head, k, units_k_);
        load_units<S>(call_.args.v, base + j, head, v, units_v_);
      } else {
        clear_units(k, units_k_);
        clear_units(v, units_v_);
      }
    }
    pair_rows<S>(v_rows_ + from * units_v_, to - from, units_v_, v_ + from * units_v_);
  }

  void attend_panel(Index p, const Sight& sight) {
    score<S>(k_, units_k_, q_ + p * kPanel * units_k_, factor_of_scores_, sight.begin, sight.end, scores_, kPanel);
    if (call_.softcap > 0) bend(sight);
    hide<S>(sight, scores_, kPanel);
    const Range keys = whole_units<S>(sight);
    softmax(p, keys);
    float* out = out_ + p * kPanel * wide_v_;
    const float* v = v_ + keys.begin * units_v_;
    const float* probabilities = scores_ + keys.begin / S::kPair * kPanel;
    constexpr Index kWidth = S::kPvVectors * S::kLanes;
    for (Index r = 0; r < kPanel; r += 4) {
      // Mostly no maximum has changed, and multiplying by 1 changes no bit.
      const float* f = factor_ + r;
      const bool same = f[0] == 1 && f[1] == 1 && f[2] == 1 && f[3] == 1;
      const auto product = same ? &product_by_columns<S, false> : &product_by_columns<S, true>;
      for (Index c = 0; c < wide_v_; c += kWidth)
        product(probabilities + r, kPanel, keys.size() / S::kPair, v + c, wide_v_,
                out + r * wide_v_ + c, wide_v_, factor_ + r);
    }
  }

  // softcap·tanh(x / softcap), in units of log 2; factor_of_scores_ made sure that scores are x / softcap.
  void bend(const Sight& sight) {
    const V size = S::all(call_.softcap * kLog2E);
    for (float* at = scores_ + sight.begin * kPanel; at < scores_ + sight.end * kPanel; at += S::kLanes)
      S::store(at, S::mul(tanh<S>(S::load(at)), size));
  }

  // Scores become probabilities against the new maximum, [key / kPair][16] units in the same place; factor_ is what the
  // old sums shrink by.
  void softmax(Index p, Range keys) {
    V largest[kVectors], sum[kVectors];
    for (int v = 0; v < kVectors; ++v) largest[v] = S::load(max_ + p * kPanel + v * S::kLanes);
    for (Index j = keys.begin; j < keys.end; ++j)
      WEFT_UNROLL for (int v = 0; v < kVectors; ++v)
        largest[v] = S::max(S::load(scores_ + j * kPanel + v * S::kLanes), largest[v]);
    for (int v = 0; v < kVectors; ++v) {
      float* at = max_ + p * kPanel + v * S::kLanes;
      const V shrink = exp2_or_zero<S>(S::sub(S::load(at), largest[v]));
      S::store(factor_ + v * S::kLanes, shrink);
      S::store(at, largest[v]);
      sum[v] = S::mul(S::load(sum_ + p * kPanel + v * S::kLanes), shrink);
    }
    for (Index j = keys.begin; j < keys.end; j += S::kPair) {
      V e[kVectors][S::kPair];
      WEFT_UNROLL for (int v = 0; v < kVectors; ++v)
        WEFT_UNROLL for (int x = 0; x < S::kPair; ++x)
          e[v][x] = S::sub(S::load(scores_ + (j + x) * kPanel + v * S::kLanes), largest[v]);
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

  void end(const ForwardTile& tile) {
    const ForwardArgs& args = call_.args;
    for (Index r = 0; r < rows_; ++r) {
      const Index h = head(tile, r), t = tokens_[r];
      const RowState<float> s = state(r);
      if (!is_empty(s)) tile.max_logit[h] = max_or_nan(tile.max_logit[h], s.max);
      float* out = out_ + r * wide_v_;
      if (args.partial.given()) {
        if (!live_[r]) continue;
        args.partial.states[t * args.partial.sums.heads + h] = s;
        store_f32<S>(args.partial.sums, t, h, out);
        continue;
      }
      const FinishedRow<float> done = finish(s, sink_logit_f32(args.attention.sink, h));
      if (is_empty(s)) {
        clear_row(args.out, t, h);
      } else {
        for (Index i = 0; i < args.v.dim; ++i) out[i] *= done.weight;
        store_f32<S>(args.out, t, h, out);
      }
      if (args.lse.given()) store_number(args.lse, t, h, done.lse);
    }
  }

  const ForwardCall& call_;
  Index rows_, panels_, units_k_, wide_v_, units_v_, keys_;
  float factor_of_scores_;
  float* scratch_;
  Index used_ = 0;
  float *q_, *out_, *scores_, *k_, *v_, *v_rows_, *raw_, *max_, *sum_, *factor_;
  Index* tokens_;
  char* live_;
};

}  // namespace weft::cpu
