// The forward on Hopper: one launch, as many blocks as multiprocessors, each taking tiles until there are none left.
//
// A tile is some query rows times the query heads of one K/V head. One thread of the block walks through its slices and
// fetches Q and K by bulk tensor copies, another one V; two or three warpgroups multiply, each 64 rows. Steps of
// different tiles follow each other without a gap: the scores of the next tile are computed while the last products of
// this one run.
//
// In a step a warpgroup issues S = Q·K of this step and O += P·V of the last one, and makes P of S while the other
// warpgroups multiply. A row's bits depend on its keys alone (and on where parts of them end): tiles of keys count from
// the slice's k_first, and a tile of which a row sees nothing leaves its state as it is.
#pragma once

#include <type_traits>

#include "kernel/cuda/sm90/forward/key_splits.cuh"
#include "kernel/cuda/sm90/forward/warp_scores.cuh"
#include "kernel/cuda/sm90/ptx/wgmma.cuh"

namespace weft::cuda::sm90 {

// tanh. Small ones by their series: a large softcap multiplies them, errors and all.
__device__ inline float bent(float x) {
  const float y = x * x;
  if (y < 0.01f) return x * fmaf(y, fmaf(y, 2.0f / 15, -1.0f / 3), 1.0f);
  return 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(x * (2 * kLog2E)));
}

// Shares are taken against a score of the row that was the largest when it was taken: that of the row's first step,
// until shares sum to more than kLargeSum. So most steps need not look for their largest.
template <class N, Width kWidth, Form kForm>
struct ForwardMath : ForwardParts<N, kWidth, kForm> {
  static constexpr bool kMore = takes_any(kForm), kSteps = kForm == Form::steps, kKeyParts = takes_parts(kForm);
  static constexpr ForwardShape kShape = forward_shape(kWidth);
  static constexpr bool kBf16 = std::is_same_v<N, Bf16>;
  static constexpr int kKeys = kShape.keys, kGroups = kShape.groups, kV = kShape.v;
  static constexpr int kEights = kKeys / 8, kEarly = kShape.early;
  static constexpr float kLargeSum = 1 << 14;  // of 32 shares of a lane; f16 has room for each

  // Beside a step's flags: the sums are another tile's.
  static constexpr int kFresh = 1 << 20;
  // Steps of half a tile of keys in code of their own. With all features there is not the room, nor with parts in three
  // warpgroups; QuerySteps, whose tiles are short, lose more by code that has to be fetched than they gain, and 64 keys
  // are few.
  static constexpr bool kHalves = (kForm == Form::plain || (kForm == Form::parts && kGroups == 2)) && kKeys == 128;

  using Base = ForwardParts<N, kWidth, kForm>;
  using Base::against, Base::call, Base::group, Base::kUnseen, Base::o, Base::peak, Base::shared, Base::tile,
      Base::total, Base::unseen, Base::untouched;
  using Base::begin_rows, Base::begin_sums, Base::goes_on, Base::keep_states, Base::kept_of, Base::row_of,
      Base::rows_now, Base::shrink_kept, Base::store, Base::sums_go_on;
  using typename Base::Kept;
  using typename Base::Rows;
  float s[kKeys / 2];
  unsigned p[kKeys / 4];
  Ring<kShape.k_stages> stage;   // of this step's K
  Ring<kShape.v_stages> before;  // of the last one's V
  Ring<kShape.q_buffers> buffer;
  int flags;  // of this step

  __device__ __forceinline__ ForwardMath(const ForwardCall& c, const Shared<kWidth>& sh, int g) : Base(c, sh, g) {}

  // Of the first kCount keys' eights.
  template <int kCount>
  __device__ __forceinline__ void multiply_scores(int q_at, int k_at) {
    float(&some)[4 * kCount] = reinterpret_cast<float(&)[4 * kCount]>(s);
    const unsigned q = tile_at(shared.q(q_at) + static_cast<unsigned>(group) * 8192);
    const unsigned k = tile_at(shared.k(k_at));
#pragma unroll
    for (int i = 0; i < kShape.k / 16; ++i)
      product<kBf16>(some, moved(q, static_cast<unsigned>(i / 4 * kShape.rows() * 128 + i % 4 * 32)),
                     moved(k, static_cast<unsigned>(i / 4 * kKeys * 128 + i % 4 * 32)), i > 0);
    products_commit();
  }
  __device__ __forceinline__ void multiply_values(int v_at, bool add) {
    const unsigned v = tile_at<kKeys * 128>(shared.v(v_at));
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      const unsigned a[4] = {p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
      product<kBf16>(o, a, moved(v, static_cast<unsigned>(i * 2048)), add || i > 0);
    }
    products_commit();
  }

  // A bit for each of the lane's keys of a row, two of every eight: those of the first `count` keys of the step.
  __device__ __forceinline__ static unsigned keys_below(int count) {
    const int own = max(0, count - 2 * static_cast<int>(threadIdx.x % 4));
    const int bits = own / 8 * 2 + min(own % 8, 2);
    return bits >= 32 ? 0xffffffffu : (1u << bits) - 1;
  }
  // Scores as they count: bent, and -inf where the row does not see the key.
  template <int kCount>
  __device__ __forceinline__ void bend_and_hide(int now, int k_at) {
    if constexpr (kMore) {
      const float bend = call.scores.bend * call.sign;
#pragma unroll
      for (int i = 0; i < 4 * kCount; ++i) s[i] = bend != 0 ? bent(s[i] * bend) : s[i] * call.sign;
    }
    if ((now & Step::kMasked << group) == 0) {
      untouched &= ~3;
      return;
    }
    const Step step = read_step(shared.step(k_at));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Seen seen = keys_of_row(step, row_of(i));
      if (seen.first <= seen.last) untouched &= ~(1 << i);
      const unsigned shown = seen.last < seen.first ? 0u : keys_below(seen.last + 1) & ~keys_below(seen.first);
#pragma unroll
      for (int n = 0; n < kCount; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if ((shown >> (2 * n + j) & 1) == 0) s[4 * n + 2 * i + j] = kMinusInfinity<float>;
    }
  }
  // Each row's largest score of the step.
  template <int kCount>
  __device__ __forceinline__ void find_largest(float (&largest)[2]) {
    float most[4] = {s[0], s[1], s[2], s[3]};  // of either row, in two chains
#pragma unroll
    for (int n = 1; n < kCount; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) most[i] = max_nan(most[i], s[4 * n + i]);
    largest[0] = max_nan(most[0], most[1]);
    largest[1] = max_nan(most[2], most[3]);
#pragma unroll
    for (int bit = 1; bit <= 2; ++bit)
#pragma unroll
      for (int i = 0; i < 2; ++i) largest[i] = max_nan(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], bit));
  }
  __device__ __forceinline__ void raise_peak() {
    if constexpr (kMore) {
      if (call.max_logit == nullptr && !goes_on()) return;
      float largest[2];
      find_largest<kEights>(largest);
      peak[0] = max_nan(peak[0], largest[0]);
      peak[1] = max_nan(peak[1], largest[1]);
    }
  }

  // Rows whose first keys these are take their shares against the largest.
  template <int kCount>
  __device__ __forceinline__ void look_at_first_keys() {
    float largest[2];
    find_largest<kCount>(largest);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if ((unseen & kUnseen << i) != 0 && largest[i] != kMinusInfinity<float>) {
        against[i] = __fmul_rn(largest[i], call.scores.factor);
        unseen ^= kUnseen << i;
      }
  }
  // Scores of the keys' eights [kFrom, kTo) of kCount become shares.
  //
  // Exponentials take eight clocks each, and all else fits between them, if it is there: left alone, the assembler
  // makes the factors first, with nothing beside them, and the sums last. So each two eights wait for the sums of those
  // before.
  template <int kFrom, int kTo, int kCount = kEights>
  __device__ __forceinline__ void make_shares(float (&sum)[2]) {
    if constexpr (kMore) {  // registers are short there
#pragma unroll
      for (int i = 4 * kFrom; i < 4 * kTo; ++i) {
        s[i] = exp2_fast(fmaf(s[i], call.scores.factor, -against[i / 2 % 2]));
        sum[i / 2 % 2] += s[i];
      }
    } else {
      static_assert(kFrom % 2 == 0 && kTo % 2 == 0);
      make_parts<kFrom / 2, kTo / 2, kCount / 2>(sum);
    }
  }
  template <int kFrom, int kTo, int kParts>
  __device__ __forceinline__ void make_parts(float (&sum)[2]) {
    constexpr int kPart = 8;
    if constexpr (kFrom == 0) scale_scores<kPart>(0);
#pragma unroll
    for (int part = kFrom; part < kTo; ++part) {
#pragma unroll
      for (int i = part * kPart; i < (part + 1) * kPart; ++i) {
        asm volatile("ex2.approx.ftz.f32 %0, %0;\n" : "+f"(s[i]));
        if (part > 0) add_share(sum, i - kPart);
      }
      if (part + 1 == kParts) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) comes_after(against[i], part > 0 ? sum[i] : s[2 * i]);
      scale_scores<kPart>((part + 1) * kPart);
    }
    if constexpr (kTo == kParts)
#pragma unroll
      for (int i = (kParts - 1) * kPart; i < kParts * kPart; ++i) add_share(sum, i);
  }
  template <int kCount>
  __device__ __forceinline__ void scale_scores(int first) {
#pragma unroll
    for (int i = first; i < first + kCount; ++i)
      asm volatile("fma.rn.f32 %0, %0, %1, %2;\n" : "+f"(s[i]) : "f"(call.scores.factor), "f"(-against[i / 2 % 2]));
  }
  __device__ __forceinline__ void add_share(float (&sum)[2], int i) const {
    asm volatile("add.f32 %0, %0, %1;\n" : "+f"(sum[i / 2 % 2]) : "f"(s[i]));
  }
  // x stays as it is, but is not used before y is there: x ^ (y & 0), with a 0 that the compiler does not know.
  __device__ __forceinline__ void comes_after(float& x, float y) const {
    asm volatile("lop3.b32 %0, %0, %1, %2, 0x78;\n" : "+f"(x) : "f"(y), "r"(call.nothing));
  }
  template <int kFrom, int kTo>
  __device__ __forceinline__ void round_shares() {
#pragma unroll
    for (int i = 2 * kFrom; i < 2 * kTo; ++i) {
      unsigned one[1];
      N::pack(one, s[2 * i], s[2 * i + 1]);
      p[i] = one[0];
    }
  }
  // Shares of a row grew too large: they are made again, against this step's largest score. Products of a warpgroup
  // would need all its warps, so the warp multiplies for itself. Rows beside such a row keep their bits.
  __device__ __forceinline__ void make_shares_again(int now, float (&sum)[2]) {
    const int warp = static_cast<int>(threadIdx.x % 128) / 32;
    scores_by_warp<N, kShape.k>(s, shared.q(q_of(now)) + static_cast<unsigned>((group * 64 + warp * 16) * 128),
                                kShape.rows() * 128, shared.k(k_of(now)), kKeys * 128);
    bend_and_hide<kEights>(now, k_of(now));
    float largest[2], shrink[2];
    find_largest<kEights>(largest);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = sum[i];  // of the row's four lanes
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      const bool again = most > kLargeSum;
      const float old = against[i];
      if (again) against[i] = __fmul_rn(largest[i], call.scores.factor);
      shrink[i] = again ? exp2_fast(__fsub_rn(old, against[i])) : 1.0f;
      total[i] *= shrink[i];
      float fresh = 0;
#pragma unroll
      for (int n = 0; n < kEights; ++n) {
        const float x = exp2_fast(fmaf(s[4 * n + 2 * i], call.scores.factor, -against[i]));
        const float y = exp2_fast(fmaf(s[4 * n + 2 * i + 1], call.scores.factor, -against[i]));
        fresh += x;
        fresh += y;
        unsigned one[1];
        N::pack(one, x, y);
        if (again) p[2 * n + i] = one[0];
      }
      if (again) sum[i] = fresh;
    }
#pragma unroll
    for (int i = 0; i < kV / 2; ++i) o[i] *= shrink[i / 2 % 2];
    if constexpr (kSteps) shrink_kept(shrink);
  }

  __device__ __forceinline__ void mend_shares(int now, float (&sum)[2]) {
    if (__any_sync(0xffffffffu, sum[0] > kLargeSum || sum[1] > kLargeSum)) make_shares_again(now, sum);
  }

  __device__ __forceinline__ void begin_products() {
    settle(p);
    settle(o);
    products_begin();
  }

  // Warpgroups take turns at issuing products: while one multiplies, the others make shares.
  __device__ __forceinline__ void await_turn() const { named_sync(1 + group, 256); }
  __device__ __forceinline__ void pass_turn() const { named_arrive(1 + (group + 1) % kGroups, 256); }
  __device__ __forceinline__ void await_step() {
    wait(shared.k_full(stage.at), stage.parity);
    flags = read_word(shared.step(stage.at));
  }
  // Flags of a step and places in the rings, in one number that is the same in all lanes, and said so: what is made of
  // it is then made by the uniform half of the machine.
  __device__ __forceinline__ int all_of_step() const {
    const int own = flags | unseen | stage.at << 8 | before.at << 12 | buffer.at << 16;
    return static_cast<int>(__reduce_or_sync(0xffffffffu, static_cast<unsigned>(own)));
  }
  __device__ static int k_of(int now) { return now >> 8 & 15; }
  __device__ static int v_of(int now) { return now >> 12 & 15; }
  __device__ static int q_of(int now) { return now >> 16 & 15; }

  __device__ __forceinline__ void run() {
    if (group == kGroups - 1) named_arrive(1, 256);  // the first one's turn
    await_step();
    if ((flags & Step::kStop) != 0) return;
    tile = read_tile<kSteps, kKeyParts>(shared.step(0));
    wait(shared.q_full(0), 0);
    const Kept kept = kept_of(tile, 0);
    await_turn();
    begin_products();
    multiply_scores<kEights>(0, 0);
    pass_turn();
    products_wait<0>();
    settle(s);
    begin_rows(kept, flags);
    if (sums_go_on(flags)) begin_sums(kept);
    bend_and_hide<kEights>(flags, 0);
    raise_peak();
    look_at_first_keys<kEights>();
    float sum[2] = {0, 0};
    make_shares<0, kEights>(sum);
    round_shares<0, kEights>();
    if (goes_on()) mend_shares(flags, sum);
    total[0] += sum[0];
    total[1] += sum[1];
    release(flags, 0);
    wait(shared.v_full(0), 0);
    stage.next();
    const int first_fresh = sums_go_on(flags) ? 0 : kFresh;
    await_step();
    flags |= first_fresh;
    const int others = Step::kFirst | Step::kStop | Step::kIdle << group | (kHalves ? Step::kHalf << group : 0);
    while (true) {
      while ((flags & others) == 0) next_step<false, kEights>();
      if ((flags & Step::kStop) != 0) break;
      if ((flags & Step::kFirst) != 0) {
        const int fresh = sums_go_on(flags) ? 0 : kFresh;
        next_step<true, kEights>();
        flags |= fresh;
      } else if ((flags & Step::kIdle << group) != 0) {
        idle_step();
      } else if constexpr (kHalves) {
        next_step<false, kEights / 2>();
      }
    }
    begin_products();
    multiply_values(before.at, (flags & kFresh) == 0);
    products_wait<0>();
    settle(o);
    if constexpr (kSteps) keep_states();
    store(rows_now(), kMore ? kept_of(tile, 0) : Kept{});
  }

  // kFirst: of another tile than the step before. kCount: eights of keys, all or half of them.
  template <bool kFirst, int kCount>
  __device__ __forceinline__ void next_step() {
    // Additions to what is kept wait for a while to be sent: the earlier they begin, the more shares are made
    // meanwhile.
    constexpr int kSoon = kFirst && kSteps ? kEights / 2 - 2 : kCount == kEights ? kEarly : kCount / 2;
    const int now = all_of_step();
    StepTile next_tile;
    Kept old, kept;  // of the last tile, if it is partial, and of this one
    if constexpr (kFirst) {
      next_tile = read_tile<kSteps, kKeyParts>(shared.step(stage.at));
      if constexpr (kMore) old = kept_of(tile, 0);
      if constexpr (kMore) kept = kept_of(next_tile, 0);
      wait(shared.q_full(buffer.at), buffer.parity);
    }
    await_turn();
    begin_products();
    multiply_scores<kCount>(q_of(now), k_of(now));
    multiply_values(v_of(now), (now & kFresh) == 0);
    pass_turn();
    if constexpr (kFirst && kSteps) {
      keep_states();
      kept = kept_of(next_tile, q_of(now));
    }
    products_wait<1>();
    settle(reinterpret_cast<float(&)[4 * kCount]>(s));
    const Rows done = rows_now();
    const StepTile done_tile = tile;
    if constexpr (kFirst) {
      tile = next_tile;
      begin_rows(kept, now);
    }
    bend_and_hide<kCount>(now, k_of(now));
    raise_peak();
    // Of kept states few or none begin here.
    const bool begins = kFirst ? !goes_on() || __any_sync(0xffffffffu, unseen != 0) : (now & 3 * kUnseen) != 0;
    if (begins) look_at_first_keys<kCount>();
    Ring<kShape.v_stages> values = before;
    values.next();
    const bool values_there = has_ended_now(shared.v_full(values.at), values.parity);
    float sum[2] = {0, 0};
    make_shares<0, kSoon, kCount>(sum);
    settle(reinterpret_cast<float(&)[4 * kCount]>(s));
    // And a branch, over which the compiler does not move the next wait. Where V is often mended and late, in half a
    // step and in the short tiles of QuerySteps, it is awaited in the end (and QuerySteps' branch is never taken).
    constexpr bool kLate = kSteps || kCount != kEights;
    if (kSteps ? call.nothing != 0 : !kLate && !values_there) wait(shared.v_full(values.at), values.parity);
    products_wait<0>();
    settle(o);
    settle(p);
    arrive_together(shared.v_free(before.at));
    before = values;
    if constexpr (kFirst) {
      tile = done_tile;
      store(done, old);
      tile = next_tile;
      if (sums_go_on(now)) begin_sums(kept);
    }
    // What comes next is asked for now and looked at when the shares are made. The flags may have been read before the
    // barrier was asked: that happens when the GPU is taken from the process and given back in between.
    stage.next();
    const bool there = kReadsEarly && has_ended_now(shared.k_full(stage.at), stage.parity);
    const int coming = kReadsEarly ? read_word(shared.step(stage.at)) : 0;
    round_shares<0, kSoon>();
    make_shares<kSoon, kCount, kCount>(sum);
    round_shares<kSoon, kCount>();
    // No shares of the second half. A zero that the compiler knows of makes it serialize all products.
#pragma unroll
    for (int i = 2 * kCount; i < kKeys / 4; ++i) asm volatile("mov.b32 %0, %1;" : "=r"(p[i]) : "r"(call.nothing));
    if (!kFirst || goes_on()) mend_shares(now, sum);
    total[0] += sum[0];
    total[1] += sum[1];
    if (kLate && (!kSteps || !values_there)) wait(shared.v_full(before.at), before.parity);
    release(now, k_of(now));
    flags = coming;
    if (!there || (coming & Step::kOdd) != Step::odd(stage.parity)) await_step();
  }
  // Of keys that none of the warpgroup's rows sees: P·V of the step before, and no shares.
  __device__ __forceinline__ void idle_step() {
    const int now = all_of_step();
    await_turn();
    begin_products();
    multiply_values(v_of(now), (now & kFresh) == 0);
    pass_turn();
    Ring<kShape.v_stages> values = before;
    values.next();
    wait(shared.v_full(values.at), values.parity);
    products_wait<0>();
    settle(o);
    settle(p);
    arrive_together(shared.v_free(before.at));
    before = values;
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) p[i] = 0;
    stage.next();
    release(now, k_of(now));
    await_step();
  }
  // The shares are made: K is read, and Q if that was its last tile of keys.
  __device__ __forceinline__ void release(int now, int k_at) {
    arrive_together(shared.k_free(k_at));
    if ((now & Step::kLast) != 0) {
      arrive_together(shared.q_free(buffer.at));
      buffer.next();
    }
  }
};

}  // namespace weft::cuda::sm90
