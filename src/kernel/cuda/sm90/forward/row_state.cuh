// What a warpgroup of the Hopper forward knows of its tile's rows: where they begin, in this call or in one before it,
// and where they go when the tile is done.
#pragma once

#include "kernel/cuda/portable/scores.cuh"
#include "kernel/cuda/sm90/forward/producer.cuh"
#include "kernel/cuda/sm90/fragments.cuh"

namespace weft::cuda::sm90 {

// What a kernel is compiled for: plain scores that end as out and lse, the same over several calls (QuerySteps) or in
// parts of the keys, or whatever is asked: softcap, scales that are not positive, the largest logits, partial states or
// parts.
enum class Form { plain, steps, parts, any, any_parts };
WEFT_HD constexpr bool takes_any(Form form) { return form == Form::any || form == Form::any_parts; }
WEFT_HD constexpr bool takes_parts(Form form) { return form == Form::parts || form == Form::any_parts; }

template <class N, Width kWidth, Form kForm>
struct ForwardRows {
  static constexpr bool kMore = takes_any(kForm), kSteps = kForm == Form::steps;
  static constexpr ForwardShape kShape = forward_shape(kWidth);
  static constexpr int kV = kShape.v;
  static constexpr int kUnseen = 1 << 21;  // and the next: bits of `unseen`, beside a step's flags

  const ForwardCall& call;
  const Shared<kWidth> shared;
  const int group;  // of warps
  unsigned places;  // of the lane's two rows in a tile: rows, then heads, a byte each
  float o[kV / 2];
  float against[2];  // times the factor
  float total[2];    // this lane's share of the sum
  float peak[2];     // largest score of all, if kMore
  int unseen;        // bit kUnseen << i: row i of the lane has seen no key yet, in this call or before it
  int untouched;     // bit i: it has seen none in this call, if its sums go on; of QuerySteps also kHeld, kEnds
  StepTile tile;
  // Of QuerySteps: where the lane added to sums last. It moves from tile to tile: a place made anew would have its
  // registers taken by what comes next, which then waits until the additions are sent.
  float* added;
  int added_block = 0;

  __device__ __forceinline__ ForwardRows(const ForwardCall& c, const Shared<kWidth>& sh, int g)
      : call(c), shared(sh), group(g), places(0), added(c.steps.sums + lane_in_sums()) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = place_of(i);
      const int row = m / call.heads;  // what is computed of a row past the tile goes nowhere
      places |= static_cast<unsigned>(min(row, 255) | m % call.heads << 16) << (8 * i);
    }
  }
  __device__ __forceinline__ int row_of(int i) const { return static_cast<int>(places >> (8 * i) & 255); }
  __device__ __forceinline__ int head_of(int i) const { return static_cast<int>(places >> (16 + 8 * i) & 255); }
  // Rows go on from what is kept,
  __device__ __forceinline__ bool goes_on() const {
    return kSteps || (kForm == Form::any && call.partial.states != nullptr);
  }
  // and so do their sums, in registers. Those of QuerySteps begin anew in each call, and are added to what is kept when
  // the tile is done, which nobody waits for; only if the rows end here, what is kept comes first.
  __device__ __forceinline__ bool sums_go_on(int now) const { return kSteps ? (now & Step::kEnds) != 0 : goes_on(); }

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
  // The warp's sums of QuerySteps and of parts: as its registers have them, four of a lane after those of the lane
  // before.
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
      if (!kSteps && goes_on()) {
        if (valid && !is_empty(state) && (rows.untouched >> i & 1) == 0) keep(rows, i, sum, kept.of[i].max);
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
      store_eights<N, kV>(to, valid, 0, call.out.dim, value);
    }
  }
  // A row's sums go back to where they are kept. Where the state's max does not grow it stays what it is to the last
  // bit, however many calls there are.
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
  // Of QuerySteps. Keys that a row does not see were multiplied by zeros, which makes NaN of an infinity: rows without
  // a key in this call have their sums back, or add zeros to them, rows without one in any call zeros.
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
  // Of rows of QuerySteps that do not end here: first what is known of them, while the last products run; then their
  // sums. Stored together, the registers of the first would be waited for until the second are sent.
  __device__ __forceinline__ void keep_states() {
    if ((untouched & kEnds) != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = total[i];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (threadIdx.x % 4 == 0)
        state_at(tile, i) = (unseen & kUnseen << i) != 0 ? RowState<float>{} : RowState<float>{against[i], sum};
    }
    const int block = static_cast<int>(call.steps.block(tile.unit(), tile.tile, call.tiles));
    added += static_cast<Index>(block - added_block) * (kShape.rows() * kV);
    added_block = block;
  }
  __device__ __forceinline__ void keep_sums(const Rows& rows) {
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
};

}  // namespace weft::cuda::sm90
