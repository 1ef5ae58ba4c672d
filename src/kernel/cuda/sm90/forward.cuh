// The forward on Hopper: one launch, as many blocks as multiprocessors, each taking tiles until there are none left.
//
// A tile is some query rows times the query heads of one K/V head. One thread of the block walks through its slices and
// fetches Q and K by bulk tensor copies, another one V; two or three warpgroups multiply, each 64 rows. Steps of
// different tiles follow each other without a gap: the scores of the next tile are computed while the last products of
// this one run.
//
// In a step a warpgroup issues S = Q·K of this step and O += P·V of the last one, and makes P of S while the other
// warpgroups multiply. A row's bits depend on its keys alone: tiles of keys count from the slice's k_first, and a tile
// of which a row sees nothing leaves its state as it is.
#pragma once

#include <type_traits>

#include "kernel/cuda/scores.cuh"
#include "kernel/cuda/sm90/fetch.cuh"
#include "kernel/cuda/sm90/lanes.cuh"
#include "kernel/cuda/sm90/warp_scores.cuh"
#include "kernel/cuda/sm90/wgmma.cuh"

namespace weft::cuda::sm90 {

// tanh. Small ones by their series: a large softcap multiplies them, errors and all.
__device__ inline float bent(float x) {
  const float y = x * x;
  if (y < 0.01f) return x * fmaf(y, fmaf(y, 2.0f / 15, -1.0f / 3), 1.0f);
  return 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(x * (2 * kLog2E)));
}

// What a kernel is compiled for: plain scores that end as out and lse, the same over several calls (QuerySteps), or whatever
// is asked: softcap, scales that are not positive, the largest logits, partial states.
enum class Form { plain, steps, any };

template <class N, Width kWidth, Form kForm>
struct ForwardMath {
  static constexpr bool kMore = kForm == Form::any, kSteps = kForm == Form::steps;
  static constexpr ForwardShape kShape = forward_shape(kWidth);
  static constexpr bool kBf16 = std::is_same_v<N, Bf16>;
  static constexpr int kKeys = kShape.keys, kGroups = kShape.groups, kV = kShape.v;
  static constexpr int kEights = kKeys / 8, kEarly = kShape.early;
  static constexpr float kLargeSum = 1 << 14;  // of 32 shares of a lane; f16 has room for each

  // Beside a step's flags: the sums are another tile's; the lane's two rows have seen no key yet.
  static constexpr int kFresh = 1 << 20, kUnseen = 1 << 21;

  const ForwardCall& call;
  const Shared<kWidth> shared;
  const int group;  // of warps
  unsigned places;  // of the lane's two rows in a tile: rows, then heads, a byte each
  float o[kV / 2], s[kKeys / 2];
  unsigned p[kKeys / 4];
  // Shares are taken against a score of the row that was the largest when it was taken: that of the row's first step,
  // until shares sum to more than kLargeSum. So most steps need not look for their largest.
  float against[2];  // times the factor
  float total[2];    // this lane's share of the sum
  float peak[2];     // largest score of all, if kMore
  int unseen;        // bit kUnseen << i: row i of the lane has seen no key yet, in this call or before it
  int untouched;     // bit i: it has seen none in this call, if its sums go on; of QuerySteps also kHeld, kEnds
  Ring<kShape.k_stages> stage;   // of this step's K
  Ring<kShape.v_stages> before;  // of the last one's V
  Ring<kShape.q_buffers> buffer;
  int flags;  // of this step
  StepTile tile;
  // Of QuerySteps: where the lane added to sums last. It moves from tile to tile: a place made anew would have its registers
  // taken by what comes next, which then waits until the additions are sent.
  float* added;
  Index added_block = 0;

  __device__ __forceinline__ ForwardMath(const ForwardCall& c, const Shared<kWidth>& sh, int g)
      : call(c), shared(sh), group(g), places(0), added(c.steps.sums + lane_in_sums()) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = group * 64 + static_cast<int>(threadIdx.x % 128) / 32 * 16 + static_cast<int>(threadIdx.x % 32) / 4 +
                    8 * i;
      const int row = m / call.heads;  // what is computed of a row past the tile goes nowhere
      places |= static_cast<unsigned>(min(row, 255) | m % call.heads << 16) << (8 * i);
    }
  }
  __device__ __forceinline__ int row_of(int i) const { return static_cast<int>(places >> (8 * i) & 255); }
  __device__ __forceinline__ int head_of(int i) const { return static_cast<int>(places >> (16 + 8 * i) & 255); }
  // Rows go on from what is kept,
  __device__ __forceinline__ bool goes_on() const { return kSteps || (kMore && call.partial.states != nullptr); }
  // and so do their sums, in registers. Those of QuerySteps begin anew in each call, and are added to what is kept when the
  // tile is done, which nobody waits for; only if the rows end here, what is kept comes first.
  __device__ __forceinline__ bool sums_go_on(int now) const { return kSteps ? (now & Step::kEnds) != 0 : goes_on(); }

  __device__ __forceinline__ void multiply_scores(int q_at, int k_at) {
    const unsigned q = tile_at(shared.q(q_at) + static_cast<unsigned>(group) * 8192);
    const unsigned k = tile_at(shared.k(k_at));
#pragma unroll
    for (int i = 0; i < kShape.k / 16; ++i)
      product<kBf16>(s, moved(q, static_cast<unsigned>(i / 4 * kShape.rows() * 128 + i % 4 * 32)),
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
  __device__ __forceinline__ void bend_and_hide(int now, int k_at) {
    if constexpr (kMore) {
      const float bend = call.scores.bend * call.sign;
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) s[i] = bend != 0 ? bent(s[i] * bend) : s[i] * call.sign;
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
      for (int n = 0; n < kEights; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if ((shown >> (2 * n + j) & 1) == 0) s[4 * n + 2 * i + j] = kMinusInfinity<float>;
    }
  }
  // Each row's largest score of the step.
  __device__ __forceinline__ void find_largest(float (&largest)[2]) {
    float most[4] = {s[0], s[1], s[2], s[3]};  // of either row, in two chains
#pragma unroll
    for (int n = 1; n < kEights; ++n)
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
      if (call.max_logit == nullptr && call.partial.states == nullptr) return;
      float largest[2];
      find_largest(largest);
      peak[0] = max_nan(peak[0], largest[0]);
      peak[1] = max_nan(peak[1], largest[1]);
    }
  }

  // What is kept of the lane's two rows of a tile. Of QuerySteps max is times log2(e), and it came with the queries.
  struct Kept {
    RowState<float> of[2];
  };
  __device__ __forceinline__ int place_of(int i) const {
    return group * 64 + static_cast<int>(threadIdx.x % 128) / 32 * 16 + static_cast<int>(threadIdx.x % 32) / 4 + 8 * i;
  }
  __device__ __forceinline__ RowState<float>& state_at(const StepTile& of, int i) const {
    if constexpr (kSteps)
      return call.steps.states[call.steps.block(of.unit(), of.tile, call.tiles) * kShape.rows() + place_of(i)];
    return call.partial
        .states[static_cast<Index>(of.row + row_of(i)) * call.heads_q + of.unit() * call.heads + head_of(i)];
  }
  __device__ __forceinline__ Kept kept_of(const StepTile& of, int q_at) const {
    Kept kept;
    if (!goes_on() || (kSteps && call.steps.first)) return kept;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (row_of(i) < of.rows())
        kept.of[i] = kSteps ? read_shared_state(shared.states(q_at) + static_cast<unsigned>(place_of(i)) * 8)
                            : read_state(&state_at(of, i));
    return kept;
  }
  __device__ __forceinline__ static RowState<float> read_shared_state(unsigned at) {
    RowState<float> state;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];\n" : "=f"(state.max), "=f"(state.sum) : "r"(at) : "memory");
    return state;
  }
  // Here, not where the compiler would like it better.
  __device__ __forceinline__ static RowState<float> read_state(const RowState<float>* at) {
    RowState<float> state;
    asm volatile("ld.global.v2.f32 {%0,%1}, [%2];\n" : "=f"(state.max), "=f"(state.sum) : "l"(at) : "memory");
    return state;
  }
  // The warp's sums of QuerySteps: as its registers have them, four of a lane after those of the lane before.
  __device__ __forceinline__ int lane_in_sums() const {
    const int warp = group * 4 + static_cast<int>(threadIdx.x % 128) / 32;
    return 16 * warp * kV + static_cast<int>(threadIdx.x % 32) * 4;
  }
  __device__ __forceinline__ float* sums_at(const StepTile& of) const {
    return call.steps.sums + call.steps.block(of.unit(), of.tile, call.tiles) * (kShape.rows() * kV) + lane_in_sums();
  }
  __device__ __forceinline__ static float against_of(float max) { return __fmul_rn(max, kLog2E); }
  __device__ __forceinline__ float peak_of(float of) const { return __fdiv_rn(of, call.scores.factor); }
  // In `untouched`: sums of the warp are kept, and the tile's rows end in this call.
  static constexpr int kHeld = 4, kEnds = 8;
  // A new tile.
  __device__ __forceinline__ void begin_rows(const Kept& kept, int now) {
    unseen = untouched = 0;
    if constexpr (kSteps) {
      if (__any_sync(0xffffffffu, !is_empty(kept.of[0]) || !is_empty(kept.of[1]))) untouched |= kHeld;
      if ((now & Step::kEnds) != 0) untouched |= kEnds;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const RowState<float>& old = kept.of[i];
      const bool known = goes_on() && !is_empty(old), valid = row_of(i) < tile.rows();
      if (valid && !known) unseen |= kUnseen << i;
      if (valid) untouched |= 1 << i;
      // Anything finite will do while there are no keys. Of a row past the tile nothing is to grow.
      against[i] = known ? (kSteps ? old.max : against_of(old.max)) : valid ? 0.0f : -kMinusInfinity<float>;
      peak[i] = known ? peak_of(against[i]) : kMinusInfinity<float>;
      total[i] = known && threadIdx.x % 4 == 0 ? old.sum : 0.0f;
    }
  }
  // Its sums: those kept, or zeros. They arrive while shares are made.
  __device__ __forceinline__ void begin_sums(const Kept& kept) {
    if constexpr (kSteps) {
      if ((untouched & kHeld) != 0) {
        const float* from = sums_at(tile);
#pragma unroll
        for (int n = 0; n < kV / 8; ++n) {
          const float4 x = *reinterpret_cast<const float4*>(from + 128 * n);
          o[4 * n] = x.x, o[4 * n + 1] = x.y, o[4 * n + 2] = x.z, o[4 * n + 3] = x.w;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kV / 2; ++i) o[i] = 0;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool known = !is_empty(kept.of[i]);
        const FloatRow from(call.partial.sums, known ? tile.row + row_of(i) : 0,
                            known ? tile.unit() * call.heads + head_of(i) : 0);
#pragma unroll
        for (int n = 0; n < kV / 8; ++n) {
          const float2 x = known ? from.load(n) : float2{0, 0};
          o[4 * n + 2 * i] = x.x;
          o[4 * n + 2 * i + 1] = x.y;
        }
      }
    }
  }
  // Rows whose first keys these are take their shares against the largest.
  __device__ __forceinline__ void look_at_first_keys() {
    float largest[2];
    find_largest(largest);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if ((unseen & kUnseen << i) != 0 && largest[i] != kMinusInfinity<float>) {
        against[i] = __fmul_rn(largest[i], call.scores.factor);
        unseen ^= kUnseen << i;
      }
  }
  // Scores of the keys' eights [kFrom, kTo) become shares.
  //
  // Exponentials take eight clocks each, and all else fits between them, if it is there: left alone, the assembler makes the
  // factors first, with nothing beside them, and the sums last. So each two eights wait for the sums of those before.
  template <int kFrom, int kTo>
  __device__ __forceinline__ void make_shares(float (&sum)[2]) {
    if constexpr (kMore) {  // registers are short there
#pragma unroll
      for (int i = 4 * kFrom; i < 4 * kTo; ++i) {
        s[i] = exp2_fast(fmaf(s[i], call.scores.factor, -against[i / 2 % 2]));
        sum[i / 2 % 2] += s[i];
      }
    } else {
      static_assert(kFrom % 2 == 0 && kTo % 2 == 0);
      make_parts<kFrom / 2, kTo / 2>(sum);
    }
  }
  template <int kFrom, int kTo>
  __device__ __forceinline__ void make_parts(float (&sum)[2]) {
    constexpr int kPart = 8, kParts = kKeys / 2 / kPart;
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
      for (int i = kKeys / 2 - kPart; i < kKeys / 2; ++i) add_share(sum, i);
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
  // Shares of a row grew too large: they are made again, against this step's largest score. Products of a warpgroup would
  // need all its warps, so the warp multiplies for itself. Rows beside such a row keep their bits.
  __device__ __forceinline__ void make_shares_again(int now, float (&sum)[2]) {
    const int warp = static_cast<int>(threadIdx.x % 128) / 32;
    scores_by_warp<N, kShape.k>(s, shared.q(q_of(now)) + static_cast<unsigned>((group * 64 + warp * 16) * 128),
                                kShape.rows() * 128, shared.k(k_of(now)), kKeys * 128);
    bend_and_hide(now, k_of(now));
    float largest[2], shrink[2];
    find_largest(largest);
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

  // Sums that are kept of the tile's rows, which are not in the registers, as those are made smaller.
  __device__ __forceinline__ void shrink_kept(const float (&shrink)[2]) const {
    if ((untouched & (kHeld | kEnds)) != kHeld) return;
    float* at = sums_at(tile);
#pragma unroll 1
    for (int n = 0; n < kV / 8; ++n) {
      const float4 x = *reinterpret_cast<const float4*>(at + 128 * n);
      *reinterpret_cast<float4*>(at + 128 * n) = {x.x * shrink[0], x.y * shrink[0], x.z * shrink[1], x.w * shrink[1]};
    }
  }

  // A finished tile to its rows.
  struct Rows {
    float against[2], total[2], peak[2];
    int unseen, untouched;
  };
  __device__ __forceinline__ Rows rows_now() const {
    return {{against[0], against[1]}, {total[0], total[1]}, {peak[0], peak[1]}, unseen, untouched};
  }
  __device__ __forceinline__ void store(const Rows& rows, const Kept& kept) {
    if constexpr (kSteps) {
      restore_untouched(rows);
      if ((rows.untouched & kEnds) == 0) return keep_sums(rows);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = rows.total[i];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int row = tile.row + row_of(i), head = tile.unit() * call.heads + head_of(i);
      const bool valid = row_of(i) < tile.rows();
      RowState<float> state;
      if (valid && (rows.unseen & kUnseen << i) == 0) state = {rows.against[i] * kLn2, sum};
      if constexpr (kMore)
        if (call.max_logit != nullptr && valid && threadIdx.x % 4 == 0 && !is_empty(state))
          atomicMax(call.max_logit + head, ordered(rows.peak[i] * (call.scores.factor * kLn2)));
      if (kMore && call.partial.states != nullptr) {
        if (valid && !is_empty(state) && (rows.untouched >> i & 1) == 0)
          keep(rows, i, sum, kept.of[i].max);
        continue;
      }
      FinishedRow<float> done;
      if (valid) {
        done = finish(state, sink_logit(call.sink, head));
        if (threadIdx.x % 4 == 0 && call.lse.given())
          store_element(call.lse.data, call.lse.dtype, offset_of(call.lse, row, head), done.lse);
        if (kSteps && threadIdx.x % 4 == 0 && !call.steps.last) state_at(tile, i) = ended_row();
      }
      if (!valid && !call.wide_out) continue;
      // A row without keys: its sums are zeros times anything.
      if (is_empty(state)) {
#pragma unroll
        for (int n = 0; n < kV / 8; ++n) o[4 * n + 2 * i] = o[4 * n + 2 * i + 1] = 0;
      }
      // A zero that shrank to -0 is 0 again.
      const auto value = [&](int n, int j) { return fmaf(o[4 * n + 2 * i + j], done.weight, 0.0f); };
      if (!call.wide_out) {
        const FloatRow to(call.out, row, head);
#pragma unroll
        for (int n = 0; n < kV / 8; ++n) to.store(n, value(n, 0), value(n, 1));
        continue;
      }
      std::uint16_t* to = static_cast<std::uint16_t*>(call.out.data) + (valid ? offset_of(call.out, row, head) : 0);
#pragma unroll
      for (int n = 0; n < kV / 8; n += 4) {
        unsigned w[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          unsigned one[1];
          N::pack(one, value(n + j, 0), value(n + j, 1));
          w[j] = one[0];
        }
        exchange(w);
        const int column = 8 * (n + static_cast<int>(threadIdx.x % 4));
        if (valid && column < call.out.dim) *reinterpret_cast<uint4*>(to + column) = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
  }
  // A row's sums go back to where they are kept. Where the state's max does not grow it stays what it is to the last bit,
  // however many calls there are.
  __device__ __forceinline__ void keep(const Rows& rows, int i, float sum, float before) {
    const float first = against_of(before);
    const float largest = rows.peak[i] == peak_of(first) ? first : __fmul_rn(rows.peak[i], call.scores.factor);
    const float shrink = exp2_fast(__fsub_rn(rows.against[i], largest));
    if (threadIdx.x % 4 == 0) state_at(tile, i) = {largest == first ? before : largest * kLn2, sum * shrink};
    const FloatRow to(call.partial.sums, tile.row + row_of(i), tile.unit() * call.heads + head_of(i));
#pragma unroll
    for (int n = 0; n < kV / 8; ++n)
      to.store(n, fmaf(o[4 * n + 2 * i], shrink, 0.0f), fmaf(o[4 * n + 2 * i + 1], shrink, 0.0f));
  }
  // Of QuerySteps. Keys that a row does not see were multiplied by zeros, which makes NaN of an infinity: rows without a key
  // in this call have their sums back, or add zeros to them, rows without one in any call zeros.
  __device__ __forceinline__ void restore_untouched(const Rows& rows) {
    const auto lacks_keys = [&](int i) { return (rows.unseen & kUnseen << i) != 0 || (rows.untouched >> i & 1) != 0; };
    if (!__any_sync(0xffffffffu, lacks_keys(0) || lacks_keys(1))) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!lacks_keys(i)) continue;
      const bool kept = (rows.unseen & kUnseen << i) == 0 && (rows.untouched & kEnds) != 0;
      const float* from = sums_at(tile) + 2 * i;
#pragma unroll
      for (int n = 0; n < kV / 8; ++n) {
        const float2 x = kept ? *reinterpret_cast<const float2*>(from + 128 * n) : float2{0, 0};
        o[4 * n + 2 * i] = x.x, o[4 * n + 2 * i + 1] = x.y;
      }
    }
  }
  __device__ __forceinline__ void keep_sums(const Rows& rows) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = rows.total[i];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (threadIdx.x % 4 == 0)
        state_at(tile, i) = (rows.unseen & kUnseen << i) != 0 ? RowState<float>{} : RowState<float>{rows.against[i], sum};
    }
    const Index block = call.steps.block(tile.unit(), tile.tile, call.tiles);
    added += (block - added_block) * (kShape.rows() * kV);
    added_block = block;
    if ((rows.untouched & kHeld) != 0) {
#pragma unroll
      for (int n = 0; n < kV / 8; ++n) {
        const float four[4] = {o[4 * n], o[4 * n + 1], o[4 * n + 2], o[4 * n + 3]};
        add_four(added + 128 * n, four);
      }
    } else {
#pragma unroll
      for (int n = 0; n < kV / 8; ++n)
        *reinterpret_cast<float4*>(added + 128 * n) = {o[4 * n], o[4 * n + 1], o[4 * n + 2], o[4 * n + 3]};
    }
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
  // Flags of a step and places in the rings, in one number that is the same in all lanes, and said so: what is made of it
  // is then made by the uniform half of the machine.
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
    tile = read_tile<kSteps>(shared.step(0));
    wait(shared.q_full(0), 0);
    const Kept kept = kept_of(tile, 0);
    await_turn();
    begin_products();
    multiply_scores(0, 0);
    pass_turn();
    products_wait<0>();
    settle(s);
    begin_rows(kept, flags);
    if (sums_go_on(flags)) begin_sums(kept);
    bend_and_hide(flags, 0);
    raise_peak();
    look_at_first_keys();
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
    const int others = Step::kFirst | Step::kStop | Step::kIdle << group;
    while (true) {
      while ((flags & others) == 0) next_step<false>();
      if ((flags & Step::kStop) != 0) break;
      if ((flags & Step::kFirst) != 0) {
        const int fresh = sums_go_on(flags) ? 0 : kFresh;
        next_step<true>();
        flags |= fresh;
      } else {
        idle_step();
      }
    }
    begin_products();
    multiply_values(before.at, (flags & kFresh) == 0);
    products_wait<0>();
    settle(o);
    store(rows_now(), kMore ? kept_of(tile, 0) : Kept{});
  }

  // kFirst: of another tile than the step before.
  template <bool kFirst>
  __device__ __forceinline__ void next_step() {
    const int now = all_of_step();
    StepTile next_tile;
    Kept old, kept;  // of the last tile, if it is partial, and of this one
    if constexpr (kFirst) {
      next_tile = read_tile<kSteps>(shared.step(stage.at));
      if constexpr (kMore) old = kept_of(tile, 0);
      if constexpr (kMore) kept = kept_of(next_tile, 0);
      wait(shared.q_full(buffer.at), buffer.parity);
    }
    await_turn();
    begin_products();
    multiply_scores(q_of(now), k_of(now));
    multiply_values(v_of(now), (now & kFresh) == 0);
    pass_turn();
    if constexpr (kFirst && kSteps) kept = kept_of(next_tile, q_of(now));
    products_wait<1>();
    settle(s);
    const Rows done = rows_now();
    const StepTile done_tile = tile;
    if constexpr (kFirst) {
      tile = next_tile;
      begin_rows(kept, now);
    }
    bend_and_hide(now, k_of(now));
    raise_peak();
    // Of kept states few or none begin here.
    const bool begins = kFirst ? !goes_on() || __any_sync(0xffffffffu, unseen != 0) : (now & 3 * kUnseen) != 0;
    if (begins) look_at_first_keys();
    Ring<kShape.v_stages> values = before;
    values.next();
    const bool values_there = has_ended_now(shared.v_full(values.at), values.parity);
    float sum[2] = {0, 0};
    make_shares<0, kEarly>(sum);
    settle(s);
    // And a branch, over which the compiler does not move the next wait.
    if (!values_there) wait(shared.v_full(values.at), values.parity);
    products_wait<0>();
    settle(o);
    settle(p);
    arrive_together(shared.v_free(before.at));
    before = values;
    const auto store_done = [&] {
      tile = done_tile;
      store(done, old);
      tile = next_tile;
      if (sums_go_on(now)) begin_sums(kept);
    };
    if constexpr (kFirst && !kSteps) store_done();
    // What comes next is asked for now and looked at when the shares are made.
    stage.next();
    const bool there = has_ended_now(shared.k_full(stage.at), stage.parity);
    const int coming = read_word(shared.step(stage.at));
    round_shares<0, kEarly>();
    make_shares<kEarly, kEights>(sum);
    round_shares<kEarly, kEights>();
    // Additions to what is kept wait for a while to be sent; nothing of the next step needs their registers soon.
    if constexpr (kFirst && kSteps) store_done();
    if (!kFirst || goes_on()) mend_shares(now, sum);
    total[0] += sum[0];
    total[1] += sum[1];
    release(now, k_of(now));
    flags = coming;
    if (!there) await_step();
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
