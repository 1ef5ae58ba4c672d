// Backward in f32 over any SIMD type: P^T and dS^T are recomputed tile by tile from the LSE, rows in lanes.
#pragma once

#include "kernel/cpu/elementwise.h"
#include "kernel/cpu/panel.h"
#include "kernel/cpu/rows.h"
#include "kernel/cpu/target.h"

#include <cmath>
#include <limits>

namespace weft::cpu {

template <class S>
class F32Backward {
 public:
  // 256 stacked rows: Q, dO, their panels and dQ stay in L2 while the keys pass by.
  static Index block_rows(const BackwardCall&, Index group) { return max_of(1, 256 / group); }
  static Index scratch(const BackwardCall& call, Index rows) { return F32Backward(call, rows, nullptr).used_; }

  static void part(const BackwardCall& call, const BackwardPart& part) {
    Index rows = 0;
    for (const Range& block : part.blocks) rows = max_of(rows, block.size());
    F32Backward work(call, rows * static_cast<Index>(part.heads.heads.size()), part.scratch);
    for (const Range& block : part.blocks) work.run(part, block);
  }

 private:
  using V = typename S::V;
  static constexpr int kVectors = static_cast<int>(kPanel) / S::kLanes;
  static constexpr Index kTile = 64;  // rows and keys of a tile: P^T and dS^T of 16 KiB each, beside K and V in L2
  static constexpr Index kWidth = S::kPvVectors * S::kLanes;

  F32Backward(const BackwardCall& call, Index rows, float* scratch)
      : call_(call),
        wide_k_(sum_width(call.args.q.dim)),
        wide_v_(sum_width(call.args.v.dim)),
        scratch_(scratch) {
    const Index most = round_up(rows, kTile);
    q_ = take(most * wide_k_);
    dout_ = take(most * wide_v_);
    q_panels_ = take(most * wide_k_);
    dout_panels_ = take(most * wide_v_);
    dq_ = take(most * wide_k_);
    lse_ = take(most);
    delta_ = take(most);
    k_ = take(kTile * wide_k_);
    v_ = take(kTile * wide_v_);
    p_ = take(kTile * kTile);
    ds_ = take(kTile * kTile);
    tokens_ = reinterpret_cast<Index*>(take(2 * most));
  }

  float* take(Index floats) {
    float* at = scratch_ ? scratch_ + used_ : nullptr;
    used_ += round_up(floats, 16);
    return at;
  }

  Index head(const BackwardPart& part, Index row) const {
    return part.heads.heads[static_cast<std::size_t>(row) % part.heads.heads.size()];
  }

  void run(const BackwardPart& part, Range block) {
    rows_ = block.size() * static_cast<Index>(part.heads.heads.size());
    load_block(part, block);
    for (const KeyPlace& place : part.slices) {
      const Slice& s = call_.slices[static_cast<std::size_t>(place.slice)];
      if (s.q_begin < block.end && s.q_end > block.begin) add_slice(part, block, s, place.shift);
    }
    for (Index r = 0; r < rows_; ++r) store_f32<S>(call_.args.dq, tokens_[r], head(part, r), dq_ + r * wide_k_);
  }

  void load_block(const BackwardPart& part, Range block) {
    const Index group = static_cast<Index>(part.heads.heads.size()), most = round_up(rows_, kTile);
    for (Index r = 0; r < most; ++r) {
      tokens_[r] = block.begin + min_of(r, rows_ - 1) / group;
      float *q = q_ + r * wide_k_, *dout = dout_ + r * wide_v_;
      if (r >= rows_) {
        std::memset(q, 0, static_cast<std::size_t>(wide_k_) * sizeof(float));
        std::memset(dout, 0, static_cast<std::size_t>(wide_v_) * sizeof(float));
        lse_[r] = std::numeric_limits<float>::infinity();  // its P is 0
        delta_[r] = 0;
        continue;
      }
      const Index h = head(part, r);
      load_f32<S>(call_.args.q, tokens_[r], h, q, wide_k_);
      load_f32<S>(call_.args.dout, tokens_[r], h, dout, wide_v_);
      load_statistics(part, r, h);
    }
    const float factor = call_.softcap > 0 ? call_.scale / call_.softcap : call_.scale * kLog2E;
    for (Index r = 0; r < most; r += kPanel) {
      pack_panel<S>(q_ + r * wide_k_, wide_k_, factor, q_panels_ + r * wide_k_);
      pack_panel<S>(dout_ + r * wide_v_, wide_v_, 1.0f, dout_panels_ + r * wide_v_);
    }
    std::memset(dq_, 0, static_cast<std::size_t>(most * wide_k_) * sizeof(float));
  }

  // LSE in units of log 2, delta = dout·out, and the row's share of the sink's gradient.
  void load_statistics(const BackwardPart& part, Index r, Index h) {
    const float lse = load_number(call_.args.lse, tokens_[r], h);
    lse_[r] = is_no_keys(lse) ? std::numeric_limits<float>::infinity() : lse * kLog2E;
    load_f32<S>(call_.args.out, tokens_[r], h, v_, wide_v_);  // the key tile is free before the keys come
    float sum = 0;
    const float* dout = dout_ + r * wide_v_;
    for (Index i = 0; i < call_.args.v.dim; ++i) sum += dout[i] * v_[i];
    delta_[r] = sum;
    const float sink = sink_logit_f32(call_.args.attention.sink, h);
    if (!is_no_keys(sink)) part.dsink[h] -= std::exp(sink - lse) * sum;
  }
  static bool is_no_keys(float logit) { return logit == -std::numeric_limits<float>::infinity(); }

  void add_slice(const BackwardPart& part, Range block, const Slice& s, Index shift) {
    const Range rows{max_of(s.q_begin, block.begin), min_of(s.q_end, block.end)};
    const Range seen{max_of(s.k_begin, shift_bound(s.lo, rows.begin)), min_of(s.k_end, shift_bound(s.hi, rows.end))};
    const Index group = static_cast<Index>(part.heads.heads.size());
    const Index first = (rows.begin - block.begin) * group / kTile, last = ((rows.end - block.begin) * group - 1) / kTile;
    for (Index base = s.k_begin + (seen.begin - s.k_begin) / kTile * kTile; base < seen.end; base += kTile) {
      const Range keys{max_of(0, seen.begin - base), min_of(kTile, seen.end - base)};
      load_keys(base, keys, part.heads.kv_head);
      const Index sums = base + shift - part.first_sum;  // of the tile's first key
      for (Index t = first; t <= last; ++t) add_tile(s, t * kTile, base, keys, sums, part);
    }
  }

  void load_keys(Index base, Range keys, Index head) {
    for (Index j = keys.begin / 4 * 4; j < round_up(keys.end, 4); ++j) {
      float *k = k_ + j * wide_k_, *v = v_ + j * wide_v_;
      if (j >= keys.begin && j < keys.end) {
        load_f32<S>(call_.args.k, base + j, head, k, wide_k_);
        load_f32<S>(call_.args.v, base + j, head, v, wide_v_);
      } else {
        std::memset(k, 0, static_cast<std::size_t>(wide_k_) * sizeof(float));
        std::memset(v, 0, static_cast<std::size_t>(wide_v_) * sizeof(float));
      }
    }
  }

  // Rows [row, row + 64) of the block against the keys at hand.
  void add_tile(const Slice& s, Index row, Index base, Range keys, Index sums, const BackwardPart& part) {
    Range panels[kTile / kPanel];  // keys that each panel sees
    bool any = false;
    for (Index n = 0; n < kTile / kPanel; ++n) {
      const Index r = row + n * kPanel;
      panels[n] = {};
      if (r < rows_) {
        const Sight sight = sight_of(s, tokens_ + r, min_of(kPanel, rows_ - r), base, keys);
        if (sight.begin < sight.end) {
          panels[n] = {sight.begin, sight.end};
          add_panel(r, n * kPanel, sight);
          any = true;
        }
      }
      clear_unseen(n * kPanel, keys, panels[n]);
    }
    if (any) add_keys(row, keys, panels, sums, part);
  }

  // P^T and dS^T of one panel, and what its rows get: dQ += dS·K.
  void add_panel(Index r, Index column, const Sight& sight) {
    score<S>(k_, wide_k_, q_panels_ + r * wide_k_, sight.begin, sight.end, p_ + column, kTile);
    score<S>(v_, wide_v_, dout_panels_ + r * wide_v_, sight.begin, sight.end, ds_ + column, kTile);
    if (call_.softcap > 0)
      gradients<true>(r, column, sight);
    else
      gradients<false>(r, column, sight);
    for (Index c = 0; c < wide_k_; c += kWidth)
      for (Index x = 0; x < kPanel; x += 4)
        product_by_columns<S, false>(ds_ + sight.begin * kTile + column + x, kTile, sight.end - sight.begin,
                                     k_ + sight.begin * wide_k_ + c, wide_k_, dq_ + (r + x) * wide_k_ + c, wide_k_,
                                     nullptr);
  }

  // P = 2^(score - LSE); dS = P·(dP - delta)·(d logit / d q·k).
  template <bool kSoftcap>
  void gradients(Index r, Index column, const Sight& sight) {
    const V size = S::all(call_.softcap * kLog2E), scale = S::all(call_.scale), one = S::all(1.0f);
    V bent[kSoftcap ? kTile * kVectors : 1];
    if constexpr (kSoftcap) {
      for (Index j = sight.begin; j < sight.end; ++j)
        for (int v = 0; v < kVectors; ++v) {
          float* at = p_ + j * kTile + column + v * S::kLanes;
          const V t = tanh<S>(S::load(at));
          bent[j * kVectors + v] = t;
          S::store(at, S::mul(t, size));
        }
    }
    hide<S>(sight, p_ + column, kTile);
    V lse[kVectors], delta[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      lse[v] = S::load(lse_ + r + v * S::kLanes);
      delta[v] = S::load(delta_ + r + v * S::kLanes);
    }
    for (Index j = sight.begin; j < sight.end; ++j)
      WEFT_UNROLL for (int v = 0; v < kVectors; ++v) {
        float *p = p_ + j * kTile + column + v * S::kLanes, *ds = ds_ + j * kTile + column + v * S::kLanes;
        const V e = exp2_or_zero<S>(S::sub(S::load(p), lse[v]));
        S::store(p, e);
        V slope = scale;
        if constexpr (kSoftcap) {
          const V t = bent[j * kVectors + v];
          slope = S::mul(scale, S::mul(S::sub(one, t), S::add(one, t)));
        }
        S::store(ds, S::mul(S::mul(e, S::sub(S::load(ds), delta[v])), slope));
      }
  }

  // What no row of a panel sees must add nothing to the keys.
  void clear_unseen(Index column, Range keys, Range seen) {
    for (Index j = keys.begin / 4 * 4; j < round_up(keys.end, 4); ++j) {
      if (j >= seen.begin && j < seen.end) continue;
      std::memset(p_ + j * kTile + column, 0, static_cast<std::size_t>(kPanel) * sizeof(float));
      std::memset(ds_ + j * kTile + column, 0, static_cast<std::size_t>(kPanel) * sizeof(float));
    }
  }

  // What the keys get: dV += P^T·dO, dK += dS^T·Q, four keys at a time over the panels that see any of them.
  void add_keys(Index row, Range keys, const Range* panels, Index sums, const BackwardPart& part) {
    for (Index j = keys.begin; j < keys.end;) {
      const Index count = min_of(4, keys.end - j);
      Index first = kTile / kPanel, last = 0;
      for (Index n = 0; n < kTile / kPanel; ++n) {
        if (panels[n].begin >= j + count || panels[n].end <= j) continue;
        first = min_of(first, n);
        last = n + 1;
      }
      if (first < last) {
        const Index offset = first * kPanel, n = (last - first) * kPanel;
        if (count == 4)
          add_rows<4>(row + offset, j, offset, n, sums, part);
        else
          for (Index x = 0; x < count; ++x) add_rows<1>(row + offset, j + x, offset, n, sums, part);
      }
      j += count;
    }
  }

  template <int kKeys>
  void add_rows(Index row, Index j, Index offset, Index n, Index sums, const BackwardPart& part) {
    for (Index c = 0; c < wide_v_; c += kPanel)
      product_by_rows<S, kKeys, true>(p_ + j * kTile + offset, kTile, n, dout_ + row * wide_v_ + c, wide_v_,
                                      part.dv + (sums + j) * wide_v_ + c, wide_v_);
    for (Index c = 0; c < wide_k_; c += kPanel)
      product_by_rows<S, kKeys, true>(ds_ + j * kTile + offset, kTile, n, q_ + row * wide_k_ + c, wide_k_,
                                      part.dk + (sums + j) * wide_k_ + c, wide_k_);
  }

  const BackwardCall& call_;
  Index wide_k_, wide_v_;
  float* scratch_;
  Index used_ = 0, rows_ = 0;
  float *q_, *dout_, *q_panels_, *dout_panels_, *dq_, *lse_, *delta_, *k_, *v_, *p_, *ds_;
  Index* tokens_;
};

}  // namespace weft::cpu
