// What a warpgroup of the Hopper forward knows of its tile's rows: where they begin, in this call or in one before it,
// and where they go when the tile is done.
#pragma once

#include "kernel/cuda/portable/probabilities.cuh"
#include "kernel/cuda/sm90/forward/producer.cuh"
#include "kernel/cuda/sm90/fragments.cuh"

namespace weft::cuda::sm90 {

// What a kernel is compiled for: plain scores that end as out and lse, the same over several calls (QuerySteps) or in
// parts of the keys, or whatever is asked: softcap, scales that are not positive, the largest logits, partial states or
// parts.
enum class Variant { plain, steps, splits, general, general_splits };
WEFT_HD constexpr bool is_general(Variant form) { return form == Variant::general || form == Variant::general_splits; }
WEFT_HD constexpr bool has_splits(Variant form) { return form == Variant::splits || form == Variant::general_splits; }

template <class N, Width kWidth, Variant kVariant>
struct ForwardRowState {
  static constexpr bool kGeneral = is_general(kVariant), kSteps = kVariant == Variant::steps;
  static constexpr ForwardShape kShape = forward_shape(kWidth);
  static constexpr int kDimV = kShape.dim_v;
  static constexpr int kUnseen = 1 << 21;  // and the next: bits of `unseen`, beside a step's flags

  const ForwardParams& params;
  const SharedMemory<kWidth> shared;
  const int warpgroup;  // of warps
  unsigned places;      // of the lane's two rows in a tile: rows, then heads, a byte each
  float o[kDimV / 2];
  float ref_max[2];    // times the factor
  float row_sum[2];    // this lane's share of the sum
  float max_score[2];  // largest score of all, if kMore
  int unseen;          // bit kUnseen << i: row i of the lane has seen no key yet, in this call or before it
  int untouched;       // bit i: it has seen none in this call, if its sums go on; of QuerySteps also kHeld, kEnds
  QueryTile tile;
  // Of QuerySteps: where the lane added to sums last. It moves from tile to tile: a place made anew would have its
  // registers taken by what comes next, which then waits until the additions are sent.
  float* add_to;
  int add_to_block = 0;

  __device__ __forceinline__ ForwardRowState(const ForwardParams& c, const SharedMemory<kWidth>& sh, int g)
      : params(c), shared(sh), warpgroup(g), places(0), add_to(c.steps.sums + lane_offset_in_sums()) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = row_in_tile(i);
      const int row = m / params.heads;  // what is computed of a row past the tile goes nowhere
      places |= static_cast<unsigned>(min(row, 255) | m % params.heads << 16) << (8 * i);
    }
  }
  __device__ __forceinline__ int row_of(int i) const { return static_cast<int>(places >> (8 * i) & 255); }
  __device__ __forceinline__ int head_of(int i) const { return static_cast<int>(places >> (16 + 8 * i) & 255); }
  // Rows go on from what is kept,
  __device__ __forceinline__ bool resumes() const {
    return kSteps || (kVariant == Variant::general && params.partial.states != nullptr);
  }
  // and so do their sums, in registers. Those of QuerySteps begin anew in each call, and are added to what is kept when
  // the tile is done, which nobody waits for; only if the rows end here, what is kept comes first.
  __device__ __forceinline__ bool sums_resume(int now) const { return kSteps ? (now & Step::kEnds) != 0 : resumes(); }

  // What is kept of the lane's two rows of a tile. Of QuerySteps max is times log2(e), and it came with the queries.
  struct SavedState {
    RowState<float> of[2];
  };
  __device__ __forceinline__ int row_in_tile(int i) const {
    return warpgroup * 64 + static_cast<int>(threadIdx.x % 128) / 32 * 16 + static_cast<int>(threadIdx.x % 32) / 4 +
           8 * i;
  }
  __device__ __forceinline__ RowState<float>& state_at(const QueryTile& of, int i) const {
    if constexpr (kSteps)
      return params.steps.states[params.steps.block(of.unit(), of.tile, params.tiles) * kShape.rows() + row_in_tile(i)];
    return params.partial
        .states[static_cast<Index>(of.row + row_of(i)) * params.heads_q + of.unit() * params.heads + head_of(i)];
  }
  __device__ __forceinline__ SavedState load_saved(const QueryTile& of, int q_at) const {
    SavedState saved;
    if (!resumes() || (kSteps && params.steps.first)) return saved;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (row_of(i) < of.rows())
        saved.of[i] = kSteps ? read_shared_state(shared.states(q_at) + static_cast<unsigned>(row_in_tile(i)) * 8)
                             : read_state(&state_at(of, i));
    return saved;
  }
  __device__ __forceinline__ static RowState<float> read_shared_state(unsigned address) {
    RowState<float> state;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];\n" : "=f"(state.max), "=f"(state.sum) : "r"(address) : "memory");
    return state;
  }
  // Here, not where the compiler would like it better.
  __device__ __forceinline__ static RowState<float> read_state(const RowState<float>* address) {
    RowState<float> state;
    asm volatile("ld.global.v2.f32 {%0,%1}, [%2];\n" : "=f"(state.max), "=f"(state.sum) : "l"(address) : "memory");
    return state;
  }
  // The warp's sums of QuerySteps and of parts: as its registers have them, four of a lane after those of the lane
  // before.
  __device__ __forceinline__ int lane_offset_in_sums() const {
    const int warp = warpgroup * 4 + static_cast<int>(threadIdx.x % 128) / 32;
    return 16 * warp * kDimV + static_cast<int>(threadIdx.x % 32) * 4;
  }
  __device__ __forceinline__ float* sums_at(const QueryTile& of) const {
    return params.steps.sums + params.steps.block(of.unit(), of.tile, params.tiles) * (kShape.rows() * kDimV) +
           lane_offset_in_sums();
  }
  __device__ __forceinline__ static float log2_max_of(float max) { return __fmul_rn(max, kLog2E); }
  __device__ __forceinline__ float unscaled(float of) const { return __fdiv_rn(of, params.scores.scale_log2); }
  // In `untouched`: sums of the warp are kept, and the tile's rows end in this call.
  static constexpr int kHasSavedSums = 4, kEnds = 8;
  // A new tile.
  __device__ __forceinline__ void begin_rows(const SavedState& saved, int now) {
    unseen = untouched = 0;
    if constexpr (kSteps) {
      if (__any_sync(0xffffffffu, !is_empty(saved.of[0]) || !is_empty(saved.of[1]))) untouched |= kHasSavedSums;
      if ((now & Step::kEnds) != 0) untouched |= kEnds;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const RowState<float>& old = saved.of[i];
      const bool known = resumes() && !is_empty(old), valid = row_of(i) < tile.rows();
      if (valid && !known) unseen |= kUnseen << i;
      if (valid) untouched |= 1 << i;
      // Anything finite will do while there are no keys. Of a row past the tile nothing is to grow.
      ref_max[i] = known ? (kSteps ? old.max : log2_max_of(old.max)) : valid ? 0.0f : -kMinusInfinity<float>;
      max_score[i] = known ? unscaled(ref_max[i]) : kMinusInfinity<float>;
      row_sum[i] = known && threadIdx.x % 4 == 0 ? old.sum : 0.0f;
    }
  }
  // Its sums: those kept, or zeros. They arrive while shares are made.
  __device__ __forceinline__ void begin_sums(const SavedState& saved) {
    if constexpr (kSteps) {
      if ((untouched & kHasSavedSums) != 0) {
        const float* from = sums_at(tile);
#pragma unroll
        for (int n = 0; n < kDimV / 8; ++n) {
          const float4 x = *reinterpret_cast<const float4*>(from + 128 * n);
          o[4 * n] = x.x, o[4 * n + 1] = x.y, o[4 * n + 2] = x.z, o[4 * n + 3] = x.w;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kDimV / 2; ++i) o[i] = 0;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool known = !is_empty(saved.of[i]);
        const FragmentRowF32 from(params.partial.sums, known ? tile.row + row_of(i) : 0,
                                  known ? tile.unit() * params.heads + head_of(i) : 0);
#pragma unroll
        for (int n = 0; n < kDimV / 8; ++n) {
          const float2 x = known ? from.load(n) : float2{0, 0};
          o[4 * n + 2 * i] = x.x;
          o[4 * n + 2 * i + 1] = x.y;
        }
      }
    }
  }

  // Sums that are kept of the tile's rows, which are not in the registers, as those are made smaller.
  __device__ __forceinline__ void rescale_saved(const float (&rescale)[2]) const {
    if ((untouched & (kHasSavedSums | kEnds)) != kHasSavedSums) return;
    float* at = sums_at(tile);
#pragma unroll 1
    for (int n = 0; n < kDimV / 8; ++n) {
      const float4 x = *reinterpret_cast<const float4*>(at + 128 * n);
      *reinterpret_cast<float4*>(at + 128 * n) = {x.x * rescale[0], x.y * rescale[0], x.z * rescale[1],
                                                  x.w * rescale[1]};
    }
  }

  // A finished tile to its rows.
  struct Rows {
    float ref_max[2], row_sum[2], max_score[2];
    int unseen, untouched;
  };
  __device__ __forceinline__ Rows rows_now() const {
    return {{ref_max[0], ref_max[1]}, {row_sum[0], row_sum[1]}, {max_score[0], max_score[1]}, unseen, untouched};
  }
  __device__ __forceinline__ void store(const Rows& rows, const SavedState& saved) {
    if constexpr (kSteps) {
      restore_untouched(rows);
      if ((rows.untouched & kEnds) == 0) return save_sums(rows);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = rows.row_sum[i];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int row = tile.row + row_of(i), head = tile.unit() * params.heads + head_of(i);
      const bool valid = row_of(i) < tile.rows();
      RowState<float> state;
      if (valid && (rows.unseen & kUnseen << i) == 0) state = {rows.ref_max[i] * kLn2, sum};
      if constexpr (kGeneral)
        if (params.max_logit != nullptr && valid && threadIdx.x % 4 == 0 && !is_empty(state))
          atomicMax(params.max_logit + head, ordered(rows.max_score[i] * (params.scores.scale_log2 * kLn2)));
      if (!kSteps && resumes()) {
        if (valid && !is_empty(state) && (rows.untouched >> i & 1) == 0) save_row(rows, i, sum, saved.of[i].max);
        continue;
      }
      FinishedRow<float> done;
      if (valid) {
        done = finish(state, sink_logit(params.sink, head));
        if (threadIdx.x % 4 == 0 && params.lse.given())
          store_element(params.lse.data, params.lse.dtype, offset_of(params.lse, row, head), done.lse);
        if (kSteps && threadIdx.x % 4 == 0 && !params.steps.last) state_at(tile, i) = finished_row();
      }
      if (!valid && !params.vec8_out) continue;
      // A row without keys: its sums are zeros times anything.
      if (is_empty(state)) {
#pragma unroll
        for (int n = 0; n < kDimV / 8; ++n) o[4 * n + 2 * i] = o[4 * n + 2 * i + 1] = 0;
      }
      // A zero that shrank to -0 is 0 again.
      const auto value = [&](int n, int j) { return fmaf(o[4 * n + 2 * i + j], done.weight, 0.0f); };
      if (!params.vec8_out) {
        const FragmentRowF32 to(params.out, row, head);
#pragma unroll
        for (int n = 0; n < kDimV / 8; ++n) to.store(n, value(n, 0), value(n, 1));
        continue;
      }
      std::uint16_t* to = static_cast<std::uint16_t*>(params.out.data) + (valid ? offset_of(params.out, row, head) : 0);
      store_row_vec8<N, kDimV>(to, valid, 0, params.out.dim, value);
    }
  }
  // A row's sums go back to where they are kept. Where the state's max does not grow it stays what it is to the last
  // bit, however many calls there are.
  __device__ __forceinline__ void save_row(const Rows& rows, int i, float sum, float before) {
    const float first = log2_max_of(before);
    const float largest =
        rows.max_score[i] == unscaled(first) ? first : __fmul_rn(rows.max_score[i], params.scores.scale_log2);
    const float rescale = exp2_fast(__fsub_rn(rows.ref_max[i], largest));
    if (threadIdx.x % 4 == 0) state_at(tile, i) = {largest == first ? before : largest * kLn2, sum * rescale};
    const FragmentRowF32 to(params.partial.sums, tile.row + row_of(i), tile.unit() * params.heads + head_of(i));
#pragma unroll
    for (int n = 0; n < kDimV / 8; ++n)
      to.store(n, fmaf(o[4 * n + 2 * i], rescale, 0.0f), fmaf(o[4 * n + 2 * i + 1], rescale, 0.0f));
  }
  // Of QuerySteps. Keys that a row does not see were multiplied by zeros, which makes NaN of an infinity: rows without
  // a key in this call have their sums back, or add zeros to them, rows without one in any call zeros.
  __device__ __forceinline__ void restore_untouched(const Rows& rows) {
    const auto lacks_keys = [&](int i) { return (rows.unseen & kUnseen << i) != 0 || (rows.untouched >> i & 1) != 0; };
    if (!__any_sync(0xffffffffu, lacks_keys(0) || lacks_keys(1))) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!lacks_keys(i)) continue;
      const bool saved = (rows.unseen & kUnseen << i) == 0 && (rows.untouched & kEnds) != 0;
      const float* from = sums_at(tile) + 2 * i;
#pragma unroll
      for (int n = 0; n < kDimV / 8; ++n) {
        const float2 x = saved ? *reinterpret_cast<const float2*>(from + 128 * n) : float2{0, 0};
        o[4 * n + 2 * i] = x.x, o[4 * n + 2 * i + 1] = x.y;
      }
    }
  }
  // Of rows of QuerySteps that do not end here: first what is known of them, while the last products run; then their
  // sums. Stored together, the registers of the first would be waited for until the second are sent.
  __device__ __forceinline__ void save_states() {
    if ((untouched & kEnds) != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = row_sum[i];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (threadIdx.x % 4 == 0)
        state_at(tile, i) = (unseen & kUnseen << i) != 0 ? RowState<float>{} : RowState<float>{ref_max[i], sum};
    }
    const int block = static_cast<int>(params.steps.block(tile.unit(), tile.tile, params.tiles));
    add_to += static_cast<Index>(block - add_to_block) * (kShape.rows() * kDimV);
    add_to_block = block;
  }
  __device__ __forceinline__ void save_sums(const Rows& rows) {
    if ((rows.untouched & kHasSavedSums) != 0) {
#pragma unroll
      for (int n = 0; n < kDimV / 8; ++n) {
        const float four[4] = {o[4 * n], o[4 * n + 1], o[4 * n + 2], o[4 * n + 3]};
        red_add_v4_f32(add_to + 128 * n, four);
      }
    } else {
#pragma unroll
      for (int n = 0; n < kDimV / 8; ++n)
        *reinterpret_cast<float4*>(add_to + 128 * n) = {o[4 * n], o[4 * n + 1], o[4 * n + 2], o[4 * n + 3]};
    }
  }
};

}  // namespace weft::cuda::sm90
