// Forward of bf16 by tiles: P is rounded to bf16, everything else is summed in f32. Scores and sums are computed
// transposed, S^T = K·Q^T and O^T = V^T·P^T, so that rows lie in the lanes of vectors as in the f32 kernels.
#pragma once

#include "kernel/cpu/x86/tile_pipeline.h"

namespace weft::cpu {
namespace {

template <class T>
class TileForward : public ForwardEntry<TileForward<T>>, private TilePipeline<T, TileForward<T>> {
  friend ForwardEntry<TileForward>;
  friend TilePipeline<T, TileForward>;
  using S = TileVectors<T>;
  using V = __m512;
  TileForward(const ForwardCall& call, Index rows, float* scratch)
      : call_(call),
        rows_(rows),
        units_(ceil_div(rows, kUnit)),
        wide_k_(round_up(call.args.q.dim, kUnit)),
        wide_v_(round_up(call.args.v.dim, kUnit)),
        logits_(call.scale, call.softcap),
        memory_{scratch} {
    const Index widest = max_of(wide_k_, wide_v_);
    out_ = memory_.take(units_ * kUnit * wide_v_);
    scores_ = memory_.take(4 * kBlock);
    max_ = memory_.take(units_ * kUnit);
    base_ = memory_.take(units_ * kUnit);
    sum_ = memory_.take(units_ * kUnit);
    rows_of_out_ = memory_.take(kUnit * wide_v_);
    q_ = memory_.take<Bits>(units_ * kUnit * wide_k_);
    p_ = memory_.take<Bits>(4 * kTileKeys * kUnit);
    k_ = memory_.take<Bits>(kTileKeys * wide_k_);
    v_ = memory_.take<Bits>(kTileKeys * wide_v_);
    copies_ = memory_.take<Bits>(2 * kUnit * widest);
    zeros_ = memory_.take<Bits>(widest);
    tokens_ = memory_.take<Index>(units_ * kUnit);
    live_ = memory_.take<char>(units_ * kUnit);
    this->last_ = {v_, out_, wide_v_, p_};
  }

  void run(const ForwardTile& tile, const Stack& stack) {
    const TileSession<T> session;
    stack_ = stack;
    begin(tile);
    for (const Index n : tile.rows.slices) attend(call_.slices[static_cast<std::size_t>(n)], tile.heads.kv_head);
    end(tile.max_logit);
  }

  void begin(const ForwardTile& tile) {
    std::memset(zeros_, 0, at(max_of(wide_k_, wide_v_)) * sizeof(Bits));
    place_rows(call_, tile.rows, stack_, units_ * kUnit, tokens_, live_);
    for (Index r = 0; r < units_ * kUnit; ++r) {
      max_[r] = base_[r] = kNoMax;
      sum_[r] = 0;
    }
    RowPointers pointers(copies_, wide_k_);
    for (Index r = 0; r < units_ * kUnit; r += 16) {
      const Bits* rows[16];
      for (Index x = 0; x < 16; ++x)
        rows[x] = live_[r + x] ? pointers.row(call_.args.q, tokens_[r + x], stack_.head(r + x), x) : zeros_;
      pack_rows_across(rows, wide_k_ / kUnit, q_ + r / kUnit * kUnit * wide_k_ + r % kUnit / 16 * kTile, 2 * kTile);
    }
    std::memset(out_, 0, at(units_ * kUnit * wide_v_) * sizeof(float));
    if (call_.args.partial.given()) resume();
  }

  // Loads the partial state that an earlier call left.
  void resume() {
    const PartialView& partial = call_.args.partial;
    for (Index unit = 0; unit < units_; ++unit) {
      std::memset(rows_of_out_, 0, at(kUnit * wide_v_) * sizeof(float));
      for (Index r = unit * kUnit; r < min_of(rows_, (unit + 1) * kUnit); ++r) {
        const RowState<float>& state = partial.states[tokens_[r] * partial.sums.heads + stack_.head(r)];
        if (!live_[r] || is_empty(state)) continue;
        max_[r] = base_[r] = state.max * kLog2E;
        sum_[r] = state.sum;
        load_f32<S>(partial.sums, tokens_[r], stack_.head(r), rows_of_out_ + unit_slot(r % kUnit) * wide_v_, wide_v_);
      }
      unit_of_rows(rows_of_out_, wide_v_, out_ + unit * kUnit * wide_v_);
    }
  }

  void attend(const Slice& s, Index kv_head) {
    const Range units = stack_.pieces_of(s, kUnit);
    for_each_key_tile(s, stack_, kTileKeys, [&](Index base, Range keys, Range next) {
      pack_keys(base, keys, kv_head);
      this->pass(call_.args, s, tokens_, units, base, keys, next, kv_head);
    });
  }

  // K for sums over columns, V for sums over keys. Keys outside are zeros.
  void pack_keys(Index base, Range keys, Index head) {
    RowPointers k_rows(copies_, wide_k_), v_rows(copies_ + kUnit * max_of(wide_k_, wide_v_), wide_v_);
    for (Index j = keys.begin / kUnit * kUnit; j < keys.end; j += kUnit) {
      const Bits *k[kUnit], *v[kUnit];
      for (Index x = 0; x < kUnit; ++x) {
        const bool inside = j + x >= keys.begin && j + x < keys.end;
        k[x] = inside ? k_rows.row(call_.args.k, base + j + x, head, x) : zeros_;
        v[x] = inside ? v_rows.row(call_.args.v, base + j + x, head, x) : zeros_;
      }
      pack_rows(k, wide_k_ / kUnit, k_ + j * wide_k_);
      pack_rows(k + 16, wide_k_ / kUnit, k_ + (j + 16) * wide_k_);
      pack_columns(v, wide_v_, v_ + j / kUnit * kTile, kTileKeys / kUnit * kTile);
    }
  }

  Index score_steps() const { return wide_k_ / kUnit; }
  template <class Between>
  void score(const Turn& turn, Between& between) {
    for (Index m = 0; m < turn.group->count; ++m)
      if (turn.group->sees(m, turn.key))
        tile_product<T, false>({k_ + turn.key * wide_k_, 16 * wide_k_, kTile},
                               {q_ + turn.group->units[m] * kUnit * wide_k_, kTile, 2 * kTile}, wide_k_ / kUnit,
                               turn.block(scores_, m), kUnit, between);
  }

  // From scores to P in pieces: for each unit the maxima, then 4 keys at a time. P is computed against a base, the
  // row's maximum when it first saw keys; only if the maximum outgrows that by 2^kRoom the base follows it, by a whole
  // power of 2, so that what was computed before is scaled exactly. Mostly nothing is.
  class Vectors {
   public:
    Vectors(TileForward& of, const Turn& turn) : of_(of), turn_(turn) {
      for (Index m = 0; m < turn.group->count; ++m) {
        if (!turn.group->sees(m, turn.key)) continue;
        members_[count_++] = m;
        float* scores = turn.block(of.scores_, m);
        of.logits_.template scale_early<S>(scores, scores + kBlock);
        const UnitMask& mask = turn.group->masks[m];
        if (!mask.all(turn.key)) mask.apply({turn.key, turn.key + kUnit}, scores - turn.key * kUnit);
      }
    }

    Index pieces() const { return count_ * kPieces; }
    void piece(Index n) {
      const Index m = members_[n / kPieces];
      if (n % kPieces == 0)
        find_maxima(m);
      else
        probabilities(m, (n % kPieces - 1) * kKeysOfPiece);
    }

   private:
    static constexpr Index kKeysOfPiece = 4, kPieces = 1 + kUnit / kKeysOfPiece;
    static constexpr float kRoom = 8;

    void find_maxima(Index m) {
      const float* at = turn_.block(of_.scores_, m);
      V a[2] = {S::all(kNoMax), S::all(kNoMax)}, b[2] = {a[0], a[1]};
      for (Index j = 0; j < kUnit; j += 2, at += 2 * kUnit) {
        WEFT_UNROLL for (Index h = 0; h < 2; ++h) {
          a[h] = S::max(S::load(at + h * kPanel), a[h]);
          b[h] = S::max(S::load(at + kUnit + h * kPanel), b[h]);
        }
      }
      V now[2];
      bool room = true;
      for (Index h = 0; h < 2; ++h) {
        const Index row = turn_.group->units[m] * kUnit + h * kPanel;
        const V largest = S::max(a[h], b[h]), old = S::load(of_.max_ + row);
        // A row that has seen nothing keeps that mark, whatever the scale; NaN counts as seen.
        const __mmask16 seen = _mm512_cmp_ps_mask(largest, S::all(kNoMax), _CMP_NLE_UQ);
        now[h] = S::max(_mm512_mask_mul_ps(old, seen, largest, S::all(of_.logits_.late)), old);
        S::store(of_.max_ + row, now[h]);
        room = room && no_growth(now[h], S::load(of_.base_ + row)) == 0xffff;
      }
      if (!room) move_base(m, now);
    }
    static __mmask16 no_growth(V now, V base) {
      return _mm512_cmp_ps_mask(now, S::add(base, S::all(kRoom)), _CMP_LE_OQ);
    }

    WEFT_APART void move_base(Index m, const V* now) {
      V factor[2];
      for (Index h = 0; h < 2; ++h) {
        const Index row = turn_.group->units[m] * kUnit + h * kPanel;
        const V base = S::load(of_.base_ + row), sum = S::load(of_.sum_ + row);
        const __mmask16 same = no_growth(now[h], base), first = _mm512_cmp_ps_mask(base, S::all(kNoMax), _CMP_EQ_OQ);
        V by = _mm512_roundscale_ps(S::sub(now[h], base), _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
        by = _mm512_mask_mov_ps(by, same, S::zero());
        factor[h] = _mm512_maskz_scalef_ps(static_cast<__mmask16>(~first | same), S::all(1.0f), S::sub(S::zero(), by));
        S::store(of_.base_ + row, _mm512_mask_mov_ps(S::add(base, by), static_cast<__mmask16>(first & ~same), now[h]));
        S::store(of_.sum_ + row, S::mul(sum, factor[h]));
      }
      // In the order of slots (unit_slot).
      const V slots[2] = {_mm512_shuffle_f32x4(factor[0], factor[1], 0x88),
                          _mm512_shuffle_f32x4(factor[0], factor[1], 0xdd)};
      float* out = of_.out_ + turn_.group->units[m] * kUnit * of_.wide_v_;
      for (Index i = 0; i < 2 * of_.wide_v_; ++i)
        S::store(out + i * kPanel, S::mul(S::load(out + i * kPanel), slots[i % 2]));
      const __m512i high = _mm512_set1_epi32(-65536);
      const Index begin = turn_.group->masks[m].keys.begin / kUnit * 2, end = turn_.key / kUnit * 2;
      for (Index tile = begin; tile < end; ++tile) {
        for (Index i = 0; i < 16; ++i) {
          Bits* at = turn_.group->pairs[m] + tile * kTile + i * 32;
          const __m512i pair = load_bits(at);
          const V odd = S::mul(_mm512_castsi512_ps(_mm512_and_si512(pair, high)), slots[tile % 2]);
          const V even = S::mul(_mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)), slots[tile % 2]);
          store_bits(at, _mm512_or_si512(_mm512_and_si512(_mm512_castps_si512(odd), high),
                                         _mm512_srli_epi32(_mm512_castps_si512(even), 16)));
        }
      }
    }

    void probabilities(Index m, Index key) {
      const Index row = turn_.group->units[m] * kUnit;
      const float* at = turn_.block(of_.scores_, m) + key * kUnit;
      const V by = S::all(of_.logits_.late);
      V x[2 * kKeysOfPiece], minus[2], sum[2];
      for (Index h = 0; h < 2; ++h) {
        minus[h] = S::sub(S::zero(), S::load(of_.base_ + row + h * kPanel));
        sum[h] = S::load(of_.sum_ + row + h * kPanel);
      }
      WEFT_UNROLL for (Index i = 0; i < 2 * kKeysOfPiece; ++i) x[i] =
          S::fma(S::load(at + i * kPanel), by, minus[i % 2]);
      tile_exp2<2 * kKeysOfPiece>(x);
      WEFT_UNROLL for (Index i = 0; i < 2 * kKeysOfPiece; ++i) sum[i % 2] = S::add(sum[i % 2], x[i]);
      for (Index h = 0; h < 2; ++h) S::store(of_.sum_ + row + h * kPanel, sum[h]);
      Bits* to = turn_.group->pairs[m] + turn_.key / kUnit * 2 * kTile + key / 2 * 32;
      WEFT_UNROLL for (Index i = 0; i < kKeysOfPiece; i += 2) {
        __m512i halves[2];
        pair_up(T::round_two(x[2 * i], x[2 * i + 1]), T::round_two(x[2 * i + 2], x[2 * i + 3]), halves);
        WEFT_UNROLL for (Index h = 0; h < 2; ++h) store_bits(to + h * kTile + i / 2 * 32, halves[h]);
      }
    }

    TileForward& of_;
    const Turn& turn_;
    Index count_ = 0, members_[2];
  };

  void end(float* max_logit) {
    for (Index r = 0; r < rows_; ++r) {
      if (r % kUnit == 0) rows_of_unit(out_ + r * wide_v_, wide_v_, rows_of_out_);
      // From sums against the base to sums against the maximum. Maxima may lose a NaN beside masked keys, sums do not.
      const float to_max = max_[r] == base_[r] ? 1.0f : std::exp2(base_[r] - max_[r]);
      RowState<float> state;
      if (std::isnan(sum_[r]))
        state = {sum_[r], sum_[r]};
      else if (max_[r] != kNoMax)
        state = {max_[r] * kLn2, sum_[r] * to_max};
      end_row<S>(call_.args, tokens_[r], stack_.head(r), live_[r], state, max_logit, [&](float weight) {
        float* row = rows_of_out_ + unit_slot(r % kUnit) * wide_v_;
        const V by = S::all(weight * to_max);
        for (Index i = 0; i < wide_v_; i += S::kLanes) S::store(row + i, S::mul(S::load(row + i), by));
        return row;
      });
    }
  }

  const ForwardCall& call_;
  Index rows_, units_, wide_k_, wide_v_;
  BlockLogits logits_;
  Dealer memory_;
  Stack stack_ = {};
  float *out_, *scores_, *max_, *base_, *sum_, *rows_of_out_;
  Bits *q_, *p_, *k_, *v_, *copies_, *zeros_;
  Index* tokens_;
  char* live_;
};

}  // namespace
}  // namespace weft::cpu
