// Split keys (KeySplits). Concurrent splits write their state to memory, and the last to arrive merges all of them in
// order and writes the output. Otherwise one block merges each split into those before it.
#pragma once

#include "kernel/cuda/sm90/forward/row_state.cuh"

namespace weft::cuda::sm90 {

template <class N, Width kWidth, Variant kVariant>
struct ForwardKeySplits : ForwardRowState<N, kWidth, kVariant> {
  using Base = ForwardRowState<N, kWidth, kVariant>;
  using Base::params, Base::warpgroup, Base::head_of, Base::kShape, Base::kUnseen, Base::kDimV,
      Base::lane_offset_in_sums, Base::o, Base::row_of, Base::tile;
  using typename Base::Rows;
  using typename Base::SavedState;

  __device__ __forceinline__ ForwardKeySplits(const ForwardParams& c, const SharedMemory<kWidth>& sh, int g)
      : Base(c, sh, g) {}

  // Stores a finished tile, or a split of one.
  __device__ __forceinline__ void store(const Rows& rows, const SavedState& saved) {
    if constexpr (has_splits(kVariant)) {
      Rows all = rows;
      if (tile.splits() > 1) {
        if (!__any_sync(0xffffffffu, valid(0))) return;  // a warp without rows
        if (params.splits.concurrent) return store_split(rows);
        if (!merge_into_saved(all)) return;
      }
      Base::store(all, saved);
    } else {
      Base::store(rows, saved);
    }
  }

 private:
  // State of the lane's two rows: ref_max and the sum of P; empty if there are no keys.
  struct RowPairState {
    RowState<float> of[2];
  };
  struct SplitSlot {
    float* sums;
    float4* state;
  };
  __device__ __forceinline__ bool valid(int i) const { return row_of(i) < tile.rows(); }
  __device__ __forceinline__ Index tile_and_unit() const {
    return static_cast<Index>(tile.unit()) * params.tiles + tile.tile;
  }
  __device__ __forceinline__ SplitSlot slot_of_split(int split) const {
    return slot_at(tile_and_unit() * params.splits.max_splits + split);
  }
  __device__ __forceinline__ SplitSlot slot_at(Index block) const {
    return {params.splits.sums + block * (kShape.rows() * kDimV) + lane_offset_in_sums(),
            params.splits.states + block * (2 * kShape.rows()) + warpgroup * 128 + static_cast<int>(threadIdx.x % 128)};
  }

  // The state of this split. Rows that see none of its keys are empty, and their O, zeros times anything, is set to 0.
  __device__ __forceinline__ RowPairState split_state(const Rows& rows) {
    RowPairState now;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = rows.row_sum[i];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (!valid(i) || (rows.unseen & kUnseen << i) != 0) continue;
      now.of[i] = {rows.ref_max[i], sum};
      if constexpr (is_general(kVariant))
        if (params.max_logit != nullptr && threadIdx.x % 4 == 0)
          atomicMax(params.max_logit + tile.unit() * params.heads + head_of(i),
                    ordered(rows.max_score[i] * (params.scores.scale_log2 * kLn2)));
    }
    const bool none[2] = {is_empty(now.of[0]), is_empty(now.of[1])};
#pragma unroll
    for (int n = 0; n < kDimV / 2; ++n)
      if (none[n / 2 % 2]) o[n] = 0;
    return now;
  }
  // Weights of all splits before one, and of the split itself. An empty side changes nothing.
  struct Weights {
    float before[2], after[2];
  };
  __device__ __forceinline__ static Weights merge(RowPairState& all, const RowPairState& split) {
    Weights w;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const RowState<float> a = all.of[i], b = split.of[i];
      const float most = is_empty(a) ? b.max : is_empty(b) ? a.max : max_nan(a.max, b.max);
      w.before[i] = is_empty(a) ? 0.0f : exp2_fast(__fsub_rn(a.max, most));
      w.after[i] = is_empty(b) ? 0.0f : exp2_fast(__fsub_rn(b.max, most));
      all.of[i] = {most, fmaf(b.sum, w.after[i], a.sum * w.before[i])};
    }
    return w;
  }
  // Bypasses the L1 cache, because other blocks may have written the state.
  __device__ __forceinline__ static RowPairState load_state(const float4* state) {
    const float4 x = __ldcg(state);
    return {{{x.x, x.y}, {x.z, x.w}}};
  }
  __device__ __forceinline__ void store_slot(const SplitSlot& to, const RowPairState& now) const {
    *to.state = {now.of[0].max, now.of[0].sum, now.of[1].max, now.of[1].sum};
#pragma unroll
    for (int n = 0; n < kDimV / 8; ++n)
      *reinterpret_cast<float4*>(to.sums + 128 * n) = {o[4 * n], o[4 * n + 1], o[4 * n + 2], o[4 * n + 3]};
  }

  // One block, splits in order. After the last split `rows` and O hold the whole tile, as without splits, but for
  // max_logit, which split_state has already updated.
  __device__ __forceinline__ bool merge_into_saved(Rows& rows) {
    const SplitSlot saved = slot_at(static_cast<Index>(blockIdx.x));
    RowPairState all = split_state(rows);
    if (tile.split() > 0) {
      const RowPairState split = all;
      all = load_state(saved.state);
      const Weights w = merge(all, split);
#pragma unroll
      for (int eights = 0; eights < kDimV / 8; eights += 4) {
        float4 x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) x[n] = __ldcg(reinterpret_cast<const float4*>(saved.sums + 128 * (eights + n)));
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          float* to = o + 4 * (eights + n);
          to[0] = fmaf(to[0], w.after[0], x[n].x * w.before[0]);
          to[1] = fmaf(to[1], w.after[0], x[n].y * w.before[0]);
          to[2] = fmaf(to[2], w.after[1], x[n].z * w.before[1]);
          to[3] = fmaf(to[3], w.after[1], x[n].w * w.before[1]);
        }
      }
    }
    if (tile.split() + 1 < tile.splits()) {
      store_slot(saved, all);
      return false;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.ref_max[i] = all.of[i].max;
      rows.row_sum[i] = threadIdx.x % 4 == 0 ? all.of[i].sum : 0.0f;
      rows.unseen = is_empty(all.of[i]) ? rows.unseen | kUnseen << i : rows.unseen & ~(kUnseen << i);
    }
    return true;
  }

  // Concurrent splits.
  __device__ __forceinline__ void store_split(const Rows& rows) {
    const RowPairState split = split_state(rows);
    store_slot(slot_of_split(tile.split()), split);
    if (!all_splits_arrived()) return;
    const RowPairState all = compute_merge_weights();
    FinishedRow<float> done[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!valid(i)) continue;
      const int row = tile.row + row_of(i), head = tile.unit() * params.heads + head_of(i);
      RowState<float> state = all.of[i];
      if (!is_empty(state)) state.max *= kLn2;
      done[i] = finish(state, sink_logit(params.sink, head));
      if (threadIdx.x % 4 == 0 && params.lse.given())
        store_element(params.lse.data, params.lse.dtype, offset_of(params.lse, row, head), done[i].lse);
    }
    write_output(done);
  }

  // Have all splits of the warp's rows arrived?
  __device__ __forceinline__ bool all_splits_arrived() const {
    __threadfence();
    __syncwarp();
    int* arrived = params.splits.arrived + tile_and_unit() * (4 * kShape.consumers) + warpgroup * 4 +
                   static_cast<int>(threadIdx.x % 128) / 32;
    int before = 0;
    if (threadIdx.x % 32 == 0) before = atomicAdd(arrived, 1);
    if (__shfl_sync(0xffffffffu, before, 0) + 1 < tile.splits()) return false;
    __threadfence();
    if (threadIdx.x % 32 == 0) *arrived = 0;  // for the next launch
    return true;
  }

  // Replaces each split's state by its weight and that of the splits before it.
  __device__ __forceinline__ RowPairState compute_merge_weights() const {
    RowPairState all = load_state(slot_of_split(0).state), next = load_state(slot_of_split(1).state);
#pragma unroll 1
    for (int n = 1; n < tile.splits(); ++n) {
      const RowPairState split = next;
      if (n + 1 < tile.splits()) next = load_state(slot_of_split(n + 1).state);
      const Weights w = merge(all, split);
      __stcg(slot_of_split(n).state, float4{w.before[0], w.after[0], w.before[1], w.after[1]});
    }
    return all;
  }

  // 32 columns at a time, because the registers are full of the next tile's scores.
  __device__ __forceinline__ void write_output(const FinishedRow<float> (&done)[2]) const {
#pragma unroll 1
    for (int eights = 0; eights < kDimV / 8; eights += 4) {
      float sum[16];
      const auto each = [&](int split, auto&& use) {
        const float* from = slot_of_split(split).sums + 128 * eights;
        float4 x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) x[n] = __ldcg(reinterpret_cast<const float4*>(from + 128 * n));
#pragma unroll
        for (int n = 0; n < 4; ++n)
          use(sum[4 * n], x[n].x, 0), use(sum[4 * n + 1], x[n].y, 0), use(sum[4 * n + 2], x[n].z, 1),
              use(sum[4 * n + 3], x[n].w, 1);
      };
      each(0, [](float& to, float x, int) { to = x; });
#pragma unroll 2
      for (int split = 1; split < tile.splits(); ++split) {
        const float4 w = __ldcg(slot_of_split(split).state);
        each(split, [&](float& to, float x, int i) { to = fmaf(x, i == 0 ? w.y : w.w, to * (i == 0 ? w.x : w.z)); });
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool here = valid(i);
        const int row = here ? tile.row + row_of(i) : 0, head = here ? tile.unit() * params.heads + head_of(i) : 0;
        const auto value = [&](int n, int j) { return fmaf(sum[4 * n + 2 * i + j], done[i].weight, 0.0f); };
        if (params.vec8_out) {
          std::uint16_t* to = static_cast<std::uint16_t*>(params.out.data) + offset_of(params.out, row, head);
          store_row_vec8<N, 32>(to, here, 8 * eights, params.out.dim, value);
        } else if (here) {
          const FragmentRowF32 to(params.out, row, head);
#pragma unroll
          for (int n = 0; n < 4; ++n) to.store(eights + n, value(n, 0), value(n, 1));
        }
      }
    }
  }
};

}  // namespace weft::cuda::sm90
