// Backward of bf16 by tiles: P and dS are rounded to bf16, everything else is summed in f32. S^T, dP^T and dQ^T are
// transposed as in the forward; dV and dK are not, and P^T and dS^T are already their left operands.
#pragma once

#include "kernel/cpu/x86/tile_pipeline.h"

namespace weft::cpu {
namespace {

template <class T>
class TileBackward : public BackwardEntry<TileBackward<T>>, private TilePipeline<T, TileBackward<T>> {
  friend BackwardEntry<TileBackward>;
  friend TilePipeline<T, TileBackward>;
  using S = TileVectors<T>;
  using V = __m512;
  TileBackward(const BackwardCall& call, Index rows, float* scratch)
      : call_(call),
        most_(ceil_div(rows, kUnit)),
        wide_k_(round_up(call.args.q.dim, kUnit)),
        wide_v_(round_up(call.args.v.dim, kUnit)),
        logits_(call.scale, call.softcap),
        memory_{scratch} {
    const Index widest = max_of(wide_k_, wide_v_), rows32 = most_ * kUnit;
    dq_ = memory_.take(rows32 * wide_k_);
    sums_ = memory_.take(kUnit * widest);
    scores_ = memory_.take(4 * kBlock);
    dp_ = memory_.take(4 * kBlock);
    minus_lse_ = memory_.take(rows32);
    delta_ = memory_.take(rows32);
    row_ = memory_.take(2 * wide_v_);
    q_ = memory_.take<Bits>(rows32 * wide_k_);
    q_pairs_ = memory_.take<Bits>(rows32 * wide_k_);
    dout_ = memory_.take<Bits>(rows32 * wide_v_);
    dout_pairs_ = memory_.take<Bits>(rows32 * wide_v_);
    k_ = memory_.take<Bits>(kTileKeys * wide_k_);
    k_columns_ = memory_.take<Bits>(kTileKeys * wide_k_);
    v_ = memory_.take<Bits>(kTileKeys * wide_v_);
    p_ = memory_.take<Bits>(kTileKeys * rows32);
    ds_ = memory_.take<Bits>(kTileKeys * rows32);
    ds_pairs_ = memory_.take<Bits>(4 * kTileKeys * kUnit);
    copies_ = memory_.take<Bits>(2 * kUnit * widest);
    zeros_ = memory_.take<Bits>(widest);
    tokens_ = memory_.take<Index>(rows32);
    seen_ = memory_.take<Range>(most_);
    this->last_ = {k_columns_, dq_, wide_k_, ds_pairs_};
  }

  void run(const BackwardPart& part, Range block) {
    const TileSession<T> session;
    stack_ = {part.heads.heads, block};
    rows_ = stack_.rows();
    std::memset(zeros_, 0, at(max_of(wide_k_, wide_v_)) * sizeof(Bits));
    load_block(part);
    for (const KeyPlace& place : part.slices) {
      const Slice& s = call_.slices[static_cast<std::size_t>(place.slice)];
      if (s.q_begin < block.end && s.q_end > block.begin) add_slice(part, s, place.shift);
    }
    store_dq();
  }

  void load_block(const BackwardPart& part) {
    const Index widest = max_of(wide_k_, wide_v_);
    RowPointers q_at(copies_, wide_k_), dout_at(copies_ + kUnit * widest, wide_v_);
    for (Index first = 0; first < rows_; first += kUnit) {
      const Bits *q[kUnit], *dout[kUnit];
      for (Index x = 0; x < kUnit; ++x) {
        const Index r = first + x;
        tokens_[r] = stack_.token(r);
        q[x] = dout[x] = zeros_;
        RowStatistics statistics;
        if (r < rows_) {
          const Index h = stack_.head(r);
          q[x] = q_at.row(call_.args.q, tokens_[r], h, x);
          dout[x] = dout_at.row(call_.args.dout, tokens_[r], h, x);
          statistics = row_statistics<S>(call_.args, tokens_[r], h, row_, wide_v_, part.dsink);
        }
        minus_lse_[r] = -statistics.lse;
        delta_[r] = statistics.delta;
      }
      for (Index half = 0; half < 2; ++half) {
        pack_rows_across(q + half * 16, wide_k_ / kUnit, q_ + first * wide_k_ + half * kTile, 2 * kTile);
        pack_rows_across(dout + half * 16, wide_v_ / kUnit, dout_ + first * wide_v_ + half * kTile, 2 * kTile);
      }
      pack_pairs(q, wide_k_, q_pairs_ + first / kUnit * kTile, most_ * kTile);
      pack_pairs(dout, wide_v_, dout_pairs_ + first / kUnit * kTile, most_ * kTile);
    }
    std::memset(dq_, 0, at(most_ * kUnit * wide_k_) * sizeof(float));
  }

  void add_slice(const BackwardPart& part, const Slice& s, Index shift) {
    const Range units = stack_.pieces_of(s, kUnit);
    for_each_key_tile(s, stack_, kTileKeys, [&](Index base, Range keys, Range next) {
      pack_keys(base, keys, part.heads.kv_head);
      for (Index unit = units.begin; unit < units.end; ++unit) {
        UnitMask mask;
        seen_[unit] = mask.look(s, tokens_ + unit * kUnit, base, keys) ? mask.keys : Range{};
      }
      this->pass(call_.args, s, tokens_, units, base, keys, next, part.heads.kv_head);
      const Index sums = base + shift - part.first_sum;  // of the tile's first key
      for (Index j = keys.begin / kUnit * kUnit; j < keys.end; j += kUnit) {
        const Range inside{max_of(j, keys.begin), min_of(j + kUnit, keys.end)};
        const Range seeing = units_that_see(units, j);
        if (seeing.size() == 0) continue;
        add_keys(p_, j, seeing, dout_pairs_, wide_v_, inside, 1.0f, part.dv + sums * wide_v_);
        add_keys(ds_, j, seeing, q_pairs_, wide_k_, inside, call_.scale, part.dk + sums * wide_k_);
      }
    });
  }

  void pack_keys(Index base, Range keys, Index head) {
    RowPointers k_at(copies_, wide_k_), v_at(copies_ + kUnit * max_of(wide_k_, wide_v_), wide_v_);
    for (Index j = keys.begin / kUnit * kUnit; j < keys.end; j += kUnit) {
      const Bits *k[kUnit], *v[kUnit];
      for (Index x = 0; x < kUnit; ++x) {
        const bool inside = j + x >= keys.begin && j + x < keys.end;
        k[x] = inside ? k_at.row(call_.args.k, base + j + x, head, x) : zeros_;
        v[x] = inside ? v_at.row(call_.args.v, base + j + x, head, x) : zeros_;
      }
      for (Index half = 0; half < 2; ++half) {
        pack_rows(k + half * 16, wide_k_ / kUnit, k_ + (j + half * 16) * wide_k_);
        pack_rows(v + half * 16, wide_v_ / kUnit, v_ + (j + half * 16) * wide_v_);
      }
      pack_columns(k, wide_k_, k_columns_ + j / kUnit * kTile, kTileKeys / kUnit * kTile);
    }
  }

  Index score_steps() const { return (wide_k_ + wide_v_) / kUnit; }
  template <class Between>
  void score(const Turn& turn, Between& between) {
    for (Index m = 0; m < turn.group->count; ++m) {
      if (!turn.group->sees(m, turn.key)) continue;
      const Index row = turn.group->units[m] * kUnit;
      tile_product<T, false>({k_ + turn.key * wide_k_, 16 * wide_k_, kTile}, {q_ + row * wide_k_, kTile, 2 * kTile},
                             wide_k_ / kUnit, turn.block(scores_, m), kUnit, between);
      tile_product<T, false>({v_ + turn.key * wide_v_, 16 * wide_v_, kTile}, {dout_ + row * wide_v_, kTile, 2 * kTile},
                             wide_v_ / kUnit, turn.block(dp_, m), kUnit, between);
    }
  }

  // P = 2^(logit - LSE) and dS = P·(dP - delta)·(d logit / d q·k) without the scale, in pieces.
  class Vectors {
   public:
    Vectors(TileBackward& of, const Turn& turn) : of_(of), turn_(turn) {
      for (Index m = 0; m < turn.group->count; ++m) {
        if (!turn.group->sees(m, turn.key)) continue;
        float* scores = turn.block(of.scores_, m);
        const UnitMask& mask = turn.group->masks[m];
        masked_[count_] = !mask.all(turn.key);
        of.logits_.template scale_early<S>(scores, scores + kBlock);
        if (masked_[count_]) mask.apply({turn.key, turn.key + kUnit}, scores - turn.key * kUnit);
        members_[count_++] = m;
      }
    }
    Index pieces() const { return count_ * kPieces; }
    void piece(Index n) {
      const Index m = members_[n / kPieces], key = n % kPieces * kKeysOfPiece;
      if (of_.call_.softcap > 0)
        gradients<true, true>(m, key);
      else if (masked_[n / kPieces])
        gradients<false, true>(m, key);
      else
        gradients<false, false>(m, key);
    }

   private:
    static constexpr Index kKeysOfPiece = 4, kPieces = kUnit / kKeysOfPiece, kVectors = 2 * kKeysOfPiece;

    template <bool kSoftcap, bool kMasked>
    void gradients(Index m, Index key) {
      const float *score = turn_.block(of_.scores_, m) + key * kUnit, *dp = turn_.block(of_.dp_, m) + key * kUnit;
      const Index row = turn_.group->units[m] * kUnit;
      const V by = S::all(of_.logits_.late);
      V minus_lse[2], delta[2], p[kVectors], ds[kVectors];
      for (Index h = 0; h < 2; ++h) {
        minus_lse[h] = S::load(of_.minus_lse_ + row + h * kPanel);
        delta[h] = S::load(of_.delta_ + row + h * kPanel);
      }
      WEFT_UNROLL for (Index i = 0; i < kVectors; ++i) p[i] = S::fma(S::load(score + i * kPanel), by, minus_lse[i % 2]);
      tile_exp2<kVectors>(p);
      WEFT_UNROLL for (Index i = 0; i < kVectors; ++i) {
        ds[i] = S::mul(p[i], S::sub(S::load(dp + i * kPanel), delta[i % 2]));
        if constexpr (kSoftcap) {
          // tanh = score / size; masked scores are -inf, for which a tanh of -1 makes the slope 0
          const V one = S::all(1.0f);
          const V t = S::max(S::mul(S::load(score + i * kPanel), S::all(1 / of_.logits_.size)), S::all(-1.0f));
          ds[i] = S::mul(ds[i], S::mul(S::sub(one, t), S::add(one, t)));
        }
        if constexpr (kMasked) {
          // 0 also beside a dP or delta that is NaN: nothing of a row reaches keys that it does not see.
          const V none = S::all(-std::numeric_limits<float>::infinity());
          ds[i] = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(S::load(score + i * kPanel), none, _CMP_NEQ_UQ), ds[i]);
        }
      }
      store(m, turn_.key + key, p, ds);
    }

    WEFT_INLINE void store(Index m, Index key, const V* p, const V* ds) {
      const Index at = (key / 16 * of_.most_ + turn_.group->units[m]) * kTile + key % 16 * 32;
      Bits* pairs = turn_.group->pairs[m] + key / kUnit * 2 * kTile + key % kUnit / 2 * 32;
      WEFT_UNROLL for (Index i = 0; i < kKeysOfPiece; i += 2) {
        store_bits(of_.p_ + at + i * 32, T::round_two(p[2 * i], p[2 * i + 1]));
        store_bits(of_.p_ + at + (i + 1) * 32, T::round_two(p[2 * i + 2], p[2 * i + 3]));
        const __m512i even = T::round_two(ds[2 * i], ds[2 * i + 1]);
        const __m512i odd = T::round_two(ds[2 * i + 2], ds[2 * i + 3]);
        store_bits(of_.ds_ + at + i * 32, even);
        store_bits(of_.ds_ + at + (i + 1) * 32, odd);
        __m512i halves[2];
        pair_up(even, odd, halves);
        WEFT_UNROLL for (Index h = 0; h < 2; ++h) store_bits(pairs + h * kTile + i / 2 * 32, halves[h]);
      }
    }

    TileBackward& of_;
    const Turn& turn_;
    Index count_ = 0, members_[2];
    bool masked_[2];
  };

  // From the first to the last unit that sees keys [j, j + 32); those between that do not get zeros.
  Range units_that_see(Range units, Index j) {
    const auto sees = [&](Index unit) { return seen_[unit].begin <= j && seen_[unit].end > j; };
    while (units.begin < units.end && !sees(units.begin)) ++units.begin;
    while (units.begin < units.end && !sees(units.end - 1)) --units.end;
    for (Index unit = units.begin; unit < units.end; ++unit) {
      if (sees(unit)) continue;
      for (Index half = 0; half < 2; ++half) {
        const Index tile = ((j / 16 + half) * most_ + unit) * kTile;
        std::memset(p_ + tile, 0, at(kTile) * sizeof(Bits));
        std::memset(ds_ + tile, 0, at(kTile) * sizeof(Bits));
      }
    }
    return units;
  }

  // Adds factor·left^T·right to the sums of keys `inside`, which are among [j, j + 32).
  void add_keys(const Bits* left, Index j, Range units, const Bits* right, Index wide, Range inside, float factor,
                float* sums) {
    NoWork none;
    for (Index d = 0; d < wide; d += kUnit)
      tile_product<T, false>({left + (j / 16 * most_ + units.begin) * kTile, most_ * kTile, kTile},
                             {right + (d / 16 * most_ + units.begin) * kTile, most_ * kTile, kTile}, units.size(),
                             sums_ + d, wide, none);
    const V by = S::all(factor);
    const float* from = sums_ + (inside.begin - j) * wide;
    float* to = sums + inside.begin * wide;
    for (Index i = 0; i < inside.size() * wide; i += S::kLanes)
      S::store(to + i, S::fma(S::load(from + i), by, S::load(to + i)));
  }

  void store_dq() {
    float* rows = sums_;
    for (Index r = 0; r < rows_; ++r) {
      if (r % kUnit == 0) rows_of_unit(dq_ + r * wide_k_, wide_k_, rows);
      float* row = rows + unit_slot(r % kUnit) * wide_k_;
      for (Index i = 0; i < wide_k_; i += S::kLanes) S::store(row + i, S::mul(S::load(row + i), S::all(call_.scale)));
      store_f32<S>(call_.args.dq, tokens_[r], stack_.head(r), row);
    }
  }

  const BackwardCall& call_;
  Index most_, wide_k_, wide_v_;  // most_: units of a block
  BlockLogits logits_;
  Dealer memory_;
  Stack stack_ = {};
  Index rows_ = 0;
  float *dq_, *sums_, *scores_, *dp_, *minus_lse_, *delta_, *row_;
  Bits *q_, *q_pairs_, *dout_, *dout_pairs_, *k_, *k_columns_, *v_, *p_, *ds_, *ds_pairs_, *copies_, *zeros_;
  Index* tokens_;
  Range* seen_;  // keys of the tile that each unit sees
};

}  // namespace
}  // namespace weft::cpu
