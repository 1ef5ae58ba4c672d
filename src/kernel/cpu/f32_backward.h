// Backward over any SIMD type: P^T and dS^T are recomputed tile by tile from the LSE, rows in lanes. Sums are f32
// whatever the units (rows.h); of pairs, P and dS are rounded to bf16.
#pragma once

#include "kernel/cpu/panel.h"
#include "kernel/cpu/tile.h"

namespace weft::cpu {

template <class S>
class F32Backward : public BackwardEntry<F32Backward<S>> {
  friend BackwardEntry<F32Backward>;
  using V = typename S::V;
  using Visible = PanelVisibility<S::kPanel>;
  static constexpr Index kPanel = S::kPanel;
  static constexpr int kVectors = static_cast<int>(kPanel) / S::kLanes;
  static constexpr Index kTile = 64;  // rows and keys of a tile: P^T and dS^T of 16 KiB each, beside K and V in L2
  static constexpr Index kWidth = ColumnBlocks<S>::kWidth;
  static constexpr int kLastVectors = static_cast<int>(ColumnBlocks<S>::kLast) / S::kLanes;
  // Keys of sums that are computed at a time; with all vectors of a block 4 keys are enough sums.
  static constexpr int kAddKeys = S::kBlocked ? 4 : S::kKeys;
  // Floats are operands where they were computed, beside those of the tile's other panels; pairs are made from others.
  static constexpr bool kInPlace = S::kPair == 1, kRowsInPlace = ColumnBlocks<S>::kInPlace;
  static constexpr Index kScores = kInPlace ? kTile : kPanel;  // floats from the scores of a key to the next key's

  F32Backward(const BackwardCall& call, Index rows, float* scratch)
      : call_(call),
        wide_k_(sum_width(call.args.q.dim)),
        wide_v_(sum_width(call.args.v.dim)),
        units_k_(wide_k_ / S::kPair),
        units_v_(wide_v_ / S::kPair),
        factor_of_scores_(call.softcap > 0 ? call.scale / call.softcap : call.scale * kLog2E),
        memory_{scratch} {
    const Index most = round_up(rows, kTile);
    q_blocks_ = {most, units_k_};
    dout_blocks_ = {most, units_v_};
    k_blocks_ = {kTile, units_k_};
    q_ = memory_.take(most * units_k_);
    dout_ = memory_.take(most * units_v_);
    q_panels_ = memory_.take(most * units_k_);
    dout_panels_ = memory_.take(most * units_v_);
    dq_ = memory_.take(most * wide_k_);
    lse_ = memory_.take(most);
    delta_ = memory_.take(most);
    k_ = memory_.take(kTile * units_k_);
    v_ = memory_.take(kTile * units_v_);
    p_ = memory_.take(kTile * kScores);
    ds_ = memory_.take(kTile * kScores);
    k_by_keys_ = kRowsInPlace ? k_ : memory_.take(kTile * units_k_);
    p_by_rows_ = kInPlace ? p_ : memory_.take(kTile * kTile / S::kPair);
    ds_by_rows_ = kInPlace ? ds_ : memory_.take(kTile * kTile / S::kPair);
    row_ = memory_.take(2 * wide_v_);
    tokens_ = memory_.take<Index>(most);
  }

  void run(const BackwardPart& part, Range block) {
    stack_ = {part.heads.heads, block};
    rows_ = stack_.rows();
    load_block(part);
    for (const KeyPlace& place : part.slices) {
      const Slice& s = call_.slices[static_cast<std::size_t>(place.slice)];
      if (s.q_begin < block.end && s.q_end > block.begin) add_slice(part, s, place.shift);
    }
    for (Index r = 0; r < rows_; ++r) store_f32<S>(call_.args.dq, tokens_[r], stack_.head(r), dq_ + r * wide_k_);
  }

  void load_block(const BackwardPart& part) {
    const Index most = round_up(rows_, kTile);
    for (Index first = 0; first < most; first += kPanel) {
      // The key tile is not used before the keys are loaded, so its memory serves here.
      float *q = kRowsInPlace ? q_ + first * units_k_ : k_, *dout = kRowsInPlace ? dout_ + first * units_v_ : v_;
      for (Index x = 0; x < kPanel; ++x) {
        const Index r = first + x;
        tokens_[r] = stack_.token(r);
        load_row(part, r, q + x * units_k_, dout + x * units_v_);
      }
      pack_panel<S>(q, units_k_, factor_of_scores_, q_panels_ + first * units_k_);
      pack_panel<S>(dout, units_v_, 1.0f, dout_panels_ + first * units_v_);
      q_blocks_.put(q, first, kPanel, q_);
      dout_blocks_.put(dout, first, kPanel, dout_);
    }
    clear_units(dq_, most * wide_k_);
  }

  void load_row(const BackwardPart& part, Index r, float* q, float* dout) {
    RowStatistics statistics;
    if (r < rows_) {
      const Index h = stack_.head(r);
      load_units<S>(call_.args.q, tokens_[r], h, q, units_k_);
      load_units<S>(call_.args.dout, tokens_[r], h, dout, units_v_);
      statistics = row_statistics<S>(call_.args, tokens_[r], h, row_, wide_v_, part.dsink);
    } else {
      clear_units(q, units_k_);
      clear_units(dout, units_v_);
    }
    lse_[r] = statistics.lse;
    delta_[r] = statistics.delta;
  }

  void add_slice(const BackwardPart& part, const Slice& s, Index shift) {
    const Range tiles = stack_.pieces_of(s, kTile);
    for_each_key_tile(s, stack_, kTile, [&](Index base, Range keys, Range next) {
      const Range all = load_keys<S>(call_.args, base, keys, part.heads.kv_head, k_, units_k_, v_, units_v_);
      k_blocks_.put(k_ + all.begin * units_k_, all.begin, all.size(), k_by_keys_);
      prefetch_keys(call_.args, next, part.heads.kv_head);
      const Index sums = base + shift - part.first_sum;  // of the tile's first key
      for (Index t = tiles.begin; t < tiles.end; ++t) add_tile(s, t * kTile, base, keys, sums, part);
    });
  }

  // Rows [row, row + 64) of the block against the current tile of keys.
  void add_tile(const Slice& s, Index row, Index base, Range keys, Index sums, const BackwardPart& part) {
    Range panels[kTile / kPanel];  // keys that each panel sees
    bool any = false;
    for (Index n = 0; n < kTile / kPanel; ++n) {
      const Index r = row + n * kPanel;
      panels[n] = {};
      if (r < rows_) {
        const Visible visible = visibility_of<kPanel>(s, tokens_ + r, min_of(kPanel, rows_ - r), base, keys);
        if (visible.begin < visible.end) {
          panels[n] = {visible.begin, visible.end};
          add_panel(r, n * kPanel, visible);
          any = true;
        }
      }
      clear_unseen(n * kPanel, keys, panels[n]);
    }
    if (!any) return;
    add_keys(row, keys, panels, {p_by_rows_, dout_, dout_blocks_, wide_v_, part.dv + sums * wide_v_});
    add_keys(row, keys, panels, {ds_by_rows_, q_, q_blocks_, wide_k_, part.dk + sums * wide_k_});
  }

  // P^T and dS^T of one panel, and its rows' dQ += dS·K.
  void add_panel(Index r, Index column, const Visible& visible) {
    float *p = kInPlace ? p_ + column : p_, *ds = kInPlace ? ds_ + column : ds_;
    score<S>(k_, units_k_, q_panels_ + r * units_k_, factor_of_scores_, visible.begin, visible.end, p, kScores);
    score<S>(v_, units_v_, dout_panels_ + r * units_v_, 1.0f, visible.begin, visible.end, ds, kScores);
    if (call_.softcap > 0)
      gradients<true>(r, column, visible, p, ds);
    else
      gradients<false>(r, column, visible, p, ds);
    const Range keys = whole_units<S>(visible);
    const Index whole = wide_k_ / kWidth * kWidth;
    for (Index c = 0; c < whole; c += kWidth) add_dq<S::kPvVectors>(r, ds, keys, c);
    if (whole < wide_k_) add_dq<kLastVectors>(r, ds, keys, whole);
  }
  template <int kVectors>
  WEFT_INLINE void add_dq(Index r, const float* ds, Range keys, Index c) {
    for (Index x = 0; x < kPanel; x += 4)
      product_by_columns<S, kVectors, false>(ds + keys.begin / S::kPair * kScores + x, kScores, keys.size() / S::kPair,
                                             k_by_keys_ + k_blocks_.at(keys.begin, c), k_blocks_.stride(c),
                                             dq_ + (r + x) * wide_k_ + c, wide_k_, nullptr);
  }

  // P = 2^(score - LSE); dS = P·(dP - delta)·(d logit / d q·k). dS replaces dP as [key / kPair][kPanel] units; pairs of
  // rows go to p_by_rows_ and ds_by_rows_, where P and dS of floats are already.
  template <bool kSoftcap>
  void gradients(Index r, [[maybe_unused]] Index column, const Visible& visible, float* p, float* ds) {
    const Range keys = whole_units<S>(visible);
    const V size = S::all(call_.softcap * kLog2E), scale = S::all(call_.scale), one = S::all(1.0f);
    V tanhs[kSoftcap ? kTile * kVectors : 1];
    if constexpr (kSoftcap) {
      for (Index j = keys.begin; j < keys.end; ++j)
        for (int v = 0; v < kVectors; ++v) {
          float* at = p + j * kScores + v * S::kLanes;
          const V t = tanh<S>(S::load(at));
          tanhs[j * kVectors + v] = t;
          S::store(at, S::mul(t, size));
        }
    }
    apply_mask<S>(visible, p, kScores);
    V lse[kVectors], delta[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      lse[v] = S::load(lse_ + r + v * S::kLanes);
      delta[v] = S::load(delta_ + r + v * S::kLanes);
    }
    for (Index j = keys.begin; j < keys.end; j += S::kPair) {
      V e[kVectors][S::kPair];
      WEFT_UNROLL for (int v = 0; v < kVectors; ++v) WEFT_UNROLL for (int x = 0; x < S::kPair; ++x) e[v][x] =
          S::sub(S::load(p + (j + x) * kScores + v * S::kLanes), lse[v]);
      exp2_or_zero<S, kVectors * S::kPair>(e[0]);
      WEFT_UNROLL for (int v = 0; v < kVectors; ++v) {
        V d[S::kPair];
        WEFT_UNROLL for (int x = 0; x < S::kPair; ++x) {
          const Index at = (j + x) * kScores + v * S::kLanes;
          V slope = scale;
          if constexpr (kSoftcap) {
            const V t = tanhs[(j + x) * kVectors + v];
            slope = S::mul(scale, S::mul(S::sub(one, t), S::add(one, t)));
          }
          d[x] = S::mul(S::mul(e[v][x], S::sub(S::load(ds + at), delta[v])), slope);
          if constexpr (kInPlace) {
            S::store(p + at, e[v][x]);
          } else {
            const Index row = ((j + x) * kTile + column + v * S::kLanes) / S::kPair;
            S::store_rounded(p_by_rows_ + row, e[v][x]);
            S::store_rounded(ds_by_rows_ + row, d[x]);
          }
        }
        S::store(ds + j / S::kPair * kScores + v * S::kLanes, join<S>(d));
      }
    }
  }

  // Keys that no row of a panel sees must get zeros from it.
  void clear_unseen(Index column, Range keys, Range seen) {
    for (Index j = keys.begin; j < keys.end; ++j) {
      if (j >= seen.begin && j < seen.end) continue;
      clear_units(p_by_rows_ + (j * kTile + column) / S::kPair, kPanel / S::kPair);
      clear_units(ds_by_rows_ + (j * kTile + column) / S::kPair, kPanel / S::kPair);
    }
  }

  // dV += P^T·dO or dK += dS^T·Q: `a` in rows of kTile, `b` with `wide` columns, sums of as many.
  struct KeyProduct {
    const float *a, *b;
    ColumnBlocks<S> blocks;  // of b
    Index wide;
    float* sums;
  };

  // kAddKeys keys at a time over the panels that see any of them. One product after the other: its rows stay in L1.
  void add_keys(Index row, Range keys, const Range* panels, const KeyProduct& product) {
    if constexpr (S::kBlocked) {
      const Index whole = product.wide / kWidth * kWidth;
      for (Index c = 0; c < whole; c += kWidth) add_columns<S::kPvVectors>(row, keys, panels, product, {c, c + kWidth});
      if (whole < product.wide) add_columns<kLastVectors>(row, keys, panels, product, {whole, product.wide});
    } else {
      add_columns<kVectors>(row, keys, panels, product, {0, product.wide});
    }
  }
  template <int kColumns>
  void add_columns(Index row, Range keys, const Range* panels, const KeyProduct& product, Range columns) {
    for (Index j = keys.begin; j < keys.end;) {
      const Index left = keys.end - j, count = left >= kAddKeys ? kAddKeys : left >= 4 ? 4 : 1;
      Index first = kTile / kPanel, last = 0;
      for (Index n = 0; n < kTile / kPanel; ++n) {
        if (panels[n].begin >= j + count || panels[n].end <= j) continue;
        first = min_of(first, n);
        last = n + 1;
      }
      if (first < last) {
        const Range rows{first * kPanel, last * kPanel};
        if (count == kAddKeys)
          add_rows<kAddKeys, kColumns>(row, j, rows, product, columns);
        else if (kAddKeys > 4 && count == 4)
          add_rows<4, kColumns>(row, j, rows, product, columns);
        else
          add_rows<1, kColumns>(row, j, rows, product, columns);
      }
      j += count;
    }
  }

  template <int kKeys, int kColumns>
  void add_rows(Index row, Index j, Range rows, const KeyProduct& p, Range columns) {
    const float* a = p.a + (j * kTile + rows.begin) / S::kPair;
    for (Index c = columns.begin; c < columns.end; c += kColumns * S::kLanes)
      product_by_rows<S, kKeys, kColumns, true>(a, kTile / S::kPair, rows.size() / S::kPair,
                                                p.b + p.blocks.at(row + rows.begin, c), p.blocks.stride(c),
                                                p.sums + j * p.wide + c, p.wide);
  }

  const BackwardCall& call_;
  Index wide_k_, wide_v_, units_k_, units_v_;
  ColumnBlocks<S> q_blocks_ = {}, dout_blocks_ = {}, k_blocks_ = {};
  float factor_of_scores_;
  Dealer memory_;
  Stack stack_ = {};
  Index rows_ = 0;
  float *q_, *dout_, *q_panels_, *dout_panels_, *dq_, *lse_, *delta_, *k_, *v_, *p_, *ds_, *k_by_keys_, *p_by_rows_,
      *ds_by_rows_, *row_;
  Index* tokens_;
};

}  // namespace weft::cpu
