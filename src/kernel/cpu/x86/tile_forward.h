// Forward of bf16 by tiles: P is rounded to bf16, everything else is summed in f32. Scores and sums are computed
// transposed, S^T = K·Q^T and O^T = V^T·P^T, so that rows lie in the lanes of vectors as in the f32 kernels.
#pragma once

#include "kernel/cpu/tile.h"
#include "kernel/cpu/x86/tile_mask.h"
#include "kernel/cpu/x86/tile_micro.h"

namespace weft::cpu {
namespace {

template <class T>
class TileForward : public ForwardEntry<TileForward<T>> {
  friend ForwardEntry<TileForward>;
  using S = Avx512;
  using V = __m512;
  static constexpr Index kKeys = 256;  // of a tile; part of a row's arithmetic, so the same for all widths
  static constexpr Index kKeyUnits = kKeys / kUnit;

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
    scores_ = memory_.take(2 * kKeys * kUnit);
    max_ = memory_.take(units_ * kUnit);
    sum_ = memory_.take(units_ * kUnit);
    rows_of_out_ = memory_.take(kUnit * wide_v_);
    q_ = memory_.take<Bits>(units_ * kUnit * wide_k_);
    p_ = memory_.take<Bits>(2 * kKeys * kUnit);
    k_ = memory_.take<Bits>(kKeys * wide_k_);
    v_ = memory_.take<Bits>(kKeys * wide_v_);
    copies_ = memory_.take<Bits>(2 * kUnit * widest);
    zeros_ = memory_.take<Bits>(widest);
    tokens_ = memory_.take<Index>(units_ * kUnit);
    live_ = memory_.take<char>(units_ * kUnit);
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
      max_[r] = kNoMax;
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
        max_[r] = state.max * kLog2E;
        sum_[r] = state.sum;
        load_f32<S>(partial.sums, tokens_[r], stack_.head(r), rows_of_out_ + unit_slot(r % kUnit) * wide_v_, wide_v_);
      }
      unit_of_rows(rows_of_out_, wide_v_, out_ + unit * kUnit * wide_v_);
    }
  }

  // A unit on its way through a tile of keys: scores, then P, then O.
  struct Turn {
    Index unit;
    UnitMask mask;
    float* scores;  // [keys][32]
    Bits* p;        // [keys / 32][2] tiles
  };

  // Vectors make P of one unit while the tiles make O of the unit before and the scores of the next.
  void attend(const Slice& s, Index kv_head) {
    const Range units = stack_.pieces_of(s, kUnit);
    for_each_key_tile(s, stack_, kKeys, [&](Index base, Range keys, Range next) {
      pack_keys(base, keys, kv_head);
      const Index batch = ceil_div(kKeys, units.size());
      Turn *before = nullptr, *current = nullptr;
      Index n = 0;
      for (Index unit = units.begin; unit < units.end; ++unit, next.begin += batch) {
        prefetch_keys(call_.args, {next.begin, min_of(next.begin + batch, next.end)}, kv_head);
        Turn& turn = turns_[n % 3];
        if (!turn.mask.look(s, tokens_ + unit * kUnit, base, keys)) continue;
        turn.unit = unit;
        turn.scores = scores_ + n % 2 * kKeys * kUnit;
        turn.p = p_ + n % 2 * kKeys * kUnit;
        advance(before, current, &turn);
        before = current;
        current = &turn;
        ++n;
      }
      advance(before, current, nullptr);
      advance(current, nullptr, nullptr);
    });
  }

  void advance(const Turn* before, const Turn* current, const Turn* next) {
    if (current == nullptr) {
      NoWork none;
      if (before) add_values(*before, none);
      if (next) score(*next, none);
      return;
    }
    const Index steps = (before ? wide_v_ / kUnit * before->mask.keys.size() / kUnit : 0) +
                        (next ? wide_k_ / kUnit * next->mask.keys.size() / kUnit : 0);
    Softmax softmax(*this, *current);
    Pacer pacer(softmax, steps);
    if (before) add_values(*before, pacer);
    if (next) score(*next, pacer);
    pacer.finish();
    softmax.end();
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
      pack_columns(v, wide_v_, v_ + j / kUnit * kTile, kKeyUnits * kTile);
    }
  }

  template <class Between>
  void score(const Turn& turn, Between& between) {
    const Operand q{q_ + turn.unit * kUnit * wide_k_, kTile, 2 * kTile};
    for (Index j = turn.mask.keys.begin; j < turn.mask.keys.end; j += kUnit)
      tile_product<T, false>({k_ + j * wide_k_, 16 * wide_k_, kTile}, q, wide_k_ / kUnit, turn.scores + j * kUnit,
                             kUnit, between);
  }
  template <class Between>
  void add_values(const Turn& turn, Between& between) {
    const Index first = turn.mask.keys.begin / kUnit, steps = turn.mask.keys.size() / kUnit;
    const Operand p{turn.p + first * 2 * kTile, kTile, 2 * kTile};
    float* out = out_ + turn.unit * kUnit * wide_v_;
    for (Index d = 0; d < wide_v_; d += kUnit)
      tile_product<T, true>({v_ + (d / 16 * kKeyUnits + first) * kTile, kKeyUnits * kTile, kTile}, p, steps,
                            out + d * kUnit, kUnit, between);
  }

  // From scores to P of one unit in pieces: the maxima, then P, then what the sums so far shrink by.
  class Softmax {
   public:
    Softmax(TileForward& of, const Turn& turn)
        : of_(of), turn_(turn), out_(of.out_ + turn.unit * kUnit * of.wide_v_), blocks_(turn.mask.keys.size() / kUnit) {
      const Range keys = turn.mask.keys;
      of.logits_.template scale_early<S>(turn.scores + keys.begin * kUnit, turn.scores + keys.end * kUnit);
      for (Index j = keys.begin; j < keys.end; j += kUnit)
        if (!turn.mask.all(j)) turn.mask.apply({j, j + kUnit}, turn.scores);
    }

    Index pieces() const { return blocks_ + kPerBlock * blocks_ + of_.wide_v_ / kUnit; }
    void piece(Index n) {
      if (n < blocks_) {
        find_maxima(turn_.mask.keys.begin + n * kUnit);
        if (n + 1 == blocks_) take_maxima();
      } else if (n < blocks_ + kPerBlock * blocks_) {
        probabilities(turn_.mask.keys.begin + (n - blocks_) * kKeysOfPiece);
      } else if (shrinks_) {
        shrink((n - blocks_ - kPerBlock * blocks_) * kUnit);
      }
    }
    void end() {
      for (Index h = 0; h < 2; ++h) S::store(of_.sum_ + turn_.unit * kUnit + h * kPanel, sum_[h]);
    }

   private:
    static constexpr Index kKeysOfPiece = 4, kPerBlock = kUnit / kKeysOfPiece;

    void find_maxima(Index key) {
      V a[2] = {maxima_[0], maxima_[1]}, b[2] = {maxima_[0], maxima_[1]};
      const float* at = turn_.scores + key * kUnit;
      WEFT_UNROLL for (Index j = 0; j < kUnit; j += 2) {
        WEFT_UNROLL for (Index h = 0; h < 2; ++h) {
          a[h] = S::max(S::load(at + j * kUnit + h * kPanel), a[h]);
          b[h] = S::max(S::load(at + (j + 1) * kUnit + h * kPanel), b[h]);
        }
      }
      for (Index h = 0; h < 2; ++h) maxima_[h] = S::max(a[h], b[h]);
    }

    void take_maxima() {
      V factor[2];
      bool same = true;
      for (Index h = 0; h < 2; ++h) {
        float *at = of_.max_ + turn_.unit * kUnit + h * kPanel, *sum = of_.sum_ + turn_.unit * kUnit + h * kPanel;
        // A row that has seen nothing keeps that mark, whatever the scale; NaN counts as seen.
        const __mmask16 seen = _mm512_cmp_ps_mask(maxima_[h], S::all(kNoMax), _CMP_NLE_UQ);
        const V old = S::load(at);
        const V now = S::max(_mm512_mask_mul_ps(old, seen, maxima_[h], S::all(of_.logits_.late)), old);
        factor[h] = exp2_or_zero<S>(S::sub(old, now));
        S::store(at, now);
        sum_[h] = S::mul(S::load(sum), factor[h]);
        minus_max_[h] = S::sub(S::zero(), now);
        same = same && _mm512_cmp_ps_mask(factor[h], S::all(1.0f), _CMP_NEQ_UQ) == 0;
      }
      shrinks_ = !same;  // to multiply by 1 changes no bit
      // In the order of slots (unit_slot).
      factors_[0] = _mm512_shuffle_f32x4(factor[0], factor[1], 0x88);
      factors_[1] = _mm512_shuffle_f32x4(factor[0], factor[1], 0xdd);
    }

    void probabilities(Index key) {
      V x[2 * kKeysOfPiece];
      const V by = S::all(of_.logits_.late), minus[2] = {minus_max_[0], minus_max_[1]};
      const float* at = turn_.scores + key * kUnit;
      WEFT_UNROLL for (Index i = 0; i < 2 * kKeysOfPiece; ++i) x[i] =
          S::fma(S::load(at + i * kPanel), by, minus[i % 2]);
      exp2_or_zero<S, 2 * kKeysOfPiece>(x);
      WEFT_UNROLL for (Index i = 0; i < 2 * kKeysOfPiece; ++i) sum_[i % 2] = S::add(sum_[i % 2], x[i]);
      Bits* to = turn_.p + key / kUnit * 2 * kTile + key % kUnit / 2 * 32;
      WEFT_UNROLL for (Index i = 0; i < kKeysOfPiece; i += 2) {
        __m512i halves[2];
        pair_up(T::round_two(x[2 * i], x[2 * i + 1]), T::round_two(x[2 * i + 2], x[2 * i + 3]), halves);
        WEFT_UNROLL for (Index h = 0; h < 2; ++h) store_bits(to + h * kTile + i / 2 * 32, halves[h]);
      }
    }

    void shrink(Index column) {
      float* at = out_ + column * kUnit;
      WEFT_UNROLL for (Index i = 0; i < 2 * kUnit; ++i)
          S::store(at + i * kPanel, S::mul(S::load(at + i * kPanel), factors_[i % 2]));
    }

    TileForward& of_;
    const Turn& turn_;
    float* out_;
    Index blocks_;
    V maxima_[2] = {S::all(kNoMax), S::all(kNoMax)}, minus_max_[2], sum_[2], factors_[2];
    bool shrinks_ = false;
  };

  RowState<float> state(Index row) const {
    // Maxima may lose a NaN beside masked keys, sums do not.
    if (std::isnan(sum_[row])) return {sum_[row], sum_[row]};
    if (max_[row] == kNoMax) return {};
    return {max_[row] * kLn2, sum_[row]};
  }

  void end(float* max_logit) {
    for (Index r = 0; r < rows_; ++r) {
      if (r % kUnit == 0) rows_of_unit(out_ + r * wide_v_, wide_v_, rows_of_out_);
      end_row<S>(call_.args, tokens_[r], stack_.head(r), live_[r], state(r), max_logit, [&](float weight) {
        float* row = rows_of_out_ + unit_slot(r % kUnit) * wide_v_;
        for (Index i = 0; i < wide_v_; i += S::kLanes) S::store(row + i, S::mul(S::load(row + i), S::all(weight)));
        return row;
      });
    }
  }

  const ForwardCall& call_;
  Index rows_, units_, wide_k_, wide_v_;
  BlockLogits logits_;
  Dealer memory_;
  Stack stack_ = {};
  Turn turns_[3];
  float *out_, *scores_, *max_, *sum_, *rows_of_out_;
  Bits *q_, *p_, *k_, *v_, *copies_, *zeros_;
  Index* tokens_;
  char* live_;
};

}  // namespace
}  // namespace weft::cpu
