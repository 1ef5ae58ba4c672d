// The softmax state of a consumer's rows: how a tile's rows start, in this call or from an earlier one, and how they
// are written when the tile is done.
#pragma once

#include "kernel/cuda/portable/probabilities.cuh"
#include "kernel/cuda/sm90/forward/producer.cuh"
#include "kernel/cuda/sm90/fragments.cuh"

namespace weft::cuda::sm90 {

// What a kernel is compiled for: plain softmax that writes out and lse; the same over several calls (QuerySteps); or
// over splits of the keys; or the general case with softcap, scales that are not positive, max_logit and partial
// states, with or without splits.
enum class Variant { plain, steps, splits, general, general_splits };
WEFT_HD constexpr bool is_general(Variant v) { return v == Variant::general || v == Variant::general_splits; }
WEFT_HD constexpr bool has_splits(Variant v) { return v == Variant::splits || v == Variant::general_splits; }

template <class N, Width kWidth, Variant kVariant>
struct ForwardRowState {
  static constexpr bool kGeneral = is_general(kVariant), kSteps = kVariant == Variant::steps;
  static constexpr ForwardShape kShape = forward_shape(kWidth);
  static constexpr int kDimV = kShape.dim_v;
  static constexpr int kUnseen = 1 << 21;  // and the next bit: bits of `unseen` that share a word with a step's flags

  const ForwardParams& params;
  const SharedMemory<kWidth> shared;
  const int warpgroup;  // index of the consumer warpgroup
  unsigned places;      // the lane's two rows in the tile: rows, then heads, a byte each
  float o[kDimV / 2];
  float ref_max[2];    // scaled by scale_log2
  float row_sum[2];    // this lane's part of the sum of P
  float max_score[2];  // largest unscaled score, if kGeneral
  int unseen;          // bit kUnseen << i: row i of the lane has seen no key yet, in this call or an earlier one
  int untouched;       // bit i: row i has seen no key in this call; in QuerySteps also kHasSavedSums and kEnds
  QueryTile tile;
  // QuerySteps: where the lane last added to saved sums. The pointer moves from tile to tile: if it were computed anew,
  // its registers would be reused at once, which stalls until the additions are issued.
  float* add_to;
  int add_to_block = 0;

  __device__ __forceinline__ ForwardRowState(const ForwardParams& c, const SharedMemory<kWidth>& sh, int g)
      : params(c), shared(sh), warpgroup(g), places(0), add_to(c.steps.sums + lane_offset_in_sums()) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = row_in_tile(i);
      const int row = m / params.heads;  // rows past the tile are computed but never written
      places |= static_cast<unsigned>(min(row, 255) | m % params.heads << 16) << (8 * i);
    }
  }
  __device__ __forceinline__ int row_of(int i) const { return static_cast<int>(places >> (8 * i) & 255); }
  __device__ __forceinline__ int head_of(int i) const { return static_cast<int>(places >> (16 + 8 * i) & 255); }
  // Rows resume from saved state.
  __device__ __forceinline__ bool resumes() const {
    return kSteps || (kVariant == Variant::general && params.partial.states != nullptr);
  }
  // Whether O resumes in registers too. In QuerySteps O starts at zero in each call and is added to the saved sums when
  // the tile is done, asynchronously; only if the rows end in this call are the saved sums loaded first.
  __device__ __forceinline__ bool sums_resume(int now) const { return kSteps ? (now & Step::kEnds) != 0 : resumes(); }

  // The saved state of the lane's two rows. In QuerySteps max is scaled by log2(e), and the states come with Q through
  // shared memory.
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
  // volatile, so that the compiler does not move the load.
  __device__ __forceinline__ static RowState<float> read_state(const RowState<float>* address) {
    RowState<float> state;
    asm volatile("ld.global.v2.f32 {%0,%1}, [%2];\n" : "=f"(state.max), "=f"(state.sum) : "l"(address) : "memory");
    return state;
  }
  // The lane's offset in a warp's saved sums, which are in register layout: four floats of a lane after those of the
  // lane before.
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
  // Bits of `untouched`: the warp has saved sums, and the tile's rows end in this call.
  static constexpr int kHasSavedSums = 4, kEnds = 8;
  // Starts the rows of a new tile.
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
      // Any finite value will do for ref_max before the first key. With +inf, nothing grows in rows past the tile.
      ref_max[i] = known ? (kSteps ? old.max : log2_max_of(old.max)) : valid ? 0.0f : -kMinusInfinity<float>;
      max_score[i] = known ? unscaled(ref_max[i]) : kMinusInfinity<float>;
      row_sum[i] = known && threadIdx.x % 4 == 0 ? old.sum : 0.0f;
    }
  }
  // Loads the saved sums, or zeros. The loads complete while P is computed.
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

  // Rescales the saved sums of the tile's rows that are not in registers.
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

  // Writes the rows of a finished tile.
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
      // A row without keys has accumulated zeros times anything, which may be NaN.
      if (is_empty(state)) {
#pragma unroll
        for (int n = 0; n < kDimV / 8; ++n) o[4 * n + 2 * i] = o[4 * n + 2 * i + 1] = 0;
      }
      // fma with 0 turns -0 into 0.
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
  // Saves a row's partial state. Where the maximum does not grow it stays the same to the last bit, however many calls
  // there are.
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
  // QuerySteps: keys that a row does not see were multiplied by P = 0, which makes NaN of an infinity. Rows without a
  // key in this call get their saved sums back, or add zeros to them; rows without a key in any call get zeros.
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
  // Rows of QuerySteps that do not end in this call: the states are stored first, while the last WGMMA runs, then the
  // sums. Stored together, the states' registers would be waited for until the sums are issued.
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
