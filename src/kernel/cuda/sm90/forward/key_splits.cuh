// Keys in parts (KeyParts). Computed at once, what is known of a tile's rows after a part goes to memory, and when all
// parts are there, they are added in their order and written out. One after another, each is added to those before it.
#pragma once

#include "kernel/cuda/sm90/forward/row_state.cuh"

namespace weft::cuda::sm90 {

template <class N, Width kWidth, Form kForm>
struct ForwardParts : ForwardRows<N, kWidth, kForm> {
  using Base = ForwardRows<N, kWidth, kForm>;
  using Base::call, Base::group, Base::head_of, Base::kShape, Base::kUnseen, Base::kV, Base::lane_in_sums, Base::o,
      Base::row_of, Base::tile;
  using typename Base::Kept;
  using typename Base::Rows;

  __device__ __forceinline__ ForwardParts(const ForwardCall& c, const Shared<kWidth>& sh, int g) : Base(c, sh, g) {}

  // A finished tile, or a part of one.
  __device__ __forceinline__ void store(const Rows& rows, const Kept& kept) {
    if constexpr (takes_parts(kForm)) {
      Rows all = rows;
      if (tile.parts() > 1) {
        if (!__any_sync(0xffffffffu, valid(0))) return;  // a warp without rows
        if (call.parts.together) return store_part(rows);
        if (!add_to_kept(all)) return;
      }
      Base::store(all, kept);
    } else {
      Base::store(rows, kept);
    }
  }

 private:
  // Of the lane's two rows: the score that shares were taken against, times the factor, and their sum; empty: no keys.
  struct Two {
    RowState<float> of[2];
  };
  struct Place {
    float* sums;
    float4* state;
  };
  __device__ __forceinline__ bool valid(int i) const { return row_of(i) < tile.rows(); }
  __device__ __forceinline__ Index tile_and_unit() const {
    return static_cast<Index>(tile.unit()) * call.tiles + tile.tile;
  }
  __device__ __forceinline__ Place place_of_part(int part) const {
    return place_at(tile_and_unit() * call.parts.most + part);
  }
  __device__ __forceinline__ Place place_at(Index block) const {
    return {call.parts.sums + block * (kShape.rows() * kV) + lane_in_sums(),
            call.parts.states + block * (2 * kShape.rows()) + group * 128 + static_cast<int>(threadIdx.x % 128)};
  }

  // Of rows that see none of the part's keys nothing, and zeros times anything are in o: they become zeros.
  __device__ __forceinline__ Two part_of(const Rows& rows) {
    Two now;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = rows.total[i];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (!valid(i) || (rows.unseen & kUnseen << i) != 0) continue;
      now.of[i] = {rows.against[i], sum};
      if constexpr (takes_any(kForm))
        if (call.max_logit != nullptr && threadIdx.x % 4 == 0)
          atomicMax(call.max_logit + tile.unit() * call.heads + head_of(i),
                    ordered(rows.peak[i] * (call.scores.factor * kLn2)));
    }
    const bool none[2] = {is_empty(now.of[0]), is_empty(now.of[1])};
#pragma unroll
    for (int n = 0; n < kV / 2; ++n)
      if (none[n / 2 % 2]) o[n] = 0;
    return now;
  }
  // All parts before one are multiplied by one weight, the part by another. An empty one changes nothing.
  struct Weights {
    float before[2], after[2];
  };
  __device__ __forceinline__ static Weights add(Two& all, const Two& part) {
    Weights w;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const RowState<float> a = all.of[i], b = part.of[i];
      const float most = is_empty(a) ? b.max : is_empty(b) ? a.max : max_nan(a.max, b.max);
      w.before[i] = is_empty(a) ? 0.0f : exp2_fast(__fsub_rn(a.max, most));
      w.after[i] = is_empty(b) ? 0.0f : exp2_fast(__fsub_rn(b.max, most));
      all.of[i] = {most, fmaf(b.sum, w.after[i], a.sum * w.before[i])};
    }
    return w;
  }
  // Past the L1 cache: other blocks may have written that.
  __device__ __forceinline__ static Two read(const float4* state) {
    const float4 x = __ldcg(state);
    return {{{x.x, x.y}, {x.z, x.w}}};
  }
  __device__ __forceinline__ void write(const Place& to, const Two& now) const {
    *to.state = {now.of[0].max, now.of[0].sum, now.of[1].max, now.of[1].sum};
#pragma unroll
    for (int n = 0; n < kV / 8; ++n)
      *reinterpret_cast<float4*>(to.sums + 128 * n) = {o[4 * n], o[4 * n + 1], o[4 * n + 2], o[4 * n + 3]};
  }

  // One after another. After the last part all of them are in `rows` and o, as of a tile without parts, but for the
  // largest logits, which part_of has sent.
  __device__ __forceinline__ bool add_to_kept(Rows& rows) {
    const Place kept = place_at(static_cast<Index>(blockIdx.x));
    Two all = part_of(rows);
    if (tile.part() > 0) {
      const Two part = all;
      all = read(kept.state);
      const Weights w = add(all, part);
#pragma unroll
      for (int eights = 0; eights < kV / 8; eights += 4) {
        float4 x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) x[n] = __ldcg(reinterpret_cast<const float4*>(kept.sums + 128 * (eights + n)));
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
    if (tile.part() + 1 < tile.parts()) {
      write(kept, all);
      return false;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.against[i] = all.of[i].max;
      rows.total[i] = threadIdx.x % 4 == 0 ? all.of[i].sum : 0.0f;
      rows.unseen = is_empty(all.of[i]) ? rows.unseen | kUnseen << i : rows.unseen & ~(kUnseen << i);
    }
    return true;
  }

  // At once.
  __device__ __forceinline__ void store_part(const Rows& rows) {
    const Two part = part_of(rows);
    write(place_of_part(tile.part()), part);
    if (!is_last()) return;
    const Two all = weigh_parts();
    FinishedRow<float> done[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!valid(i)) continue;
      const int row = tile.row + row_of(i), head = tile.unit() * call.heads + head_of(i);
      RowState<float> state = all.of[i];
      if (!is_empty(state)) state.max *= kLn2;
      done[i] = finish(state, sink_logit(call.sink, head));
      if (threadIdx.x % 4 == 0 && call.lse.given())
        store_element(call.lse.data, call.lse.dtype, offset_of(call.lse, row, head), done[i].lse);
    }
    write_out(done);
  }

  // Are the warp's rows there of all parts?
  __device__ __forceinline__ bool is_last() const {
    __threadfence();
    __syncwarp();
    int* arrived = call.parts.arrived + tile_and_unit() * (4 * kShape.groups) + group * 4 +
                   static_cast<int>(threadIdx.x % 128) / 32;
    int before = 0;
    if (threadIdx.x % 32 == 0) before = atomicAdd(arrived, 1);
    if (__shfl_sync(0xffffffffu, before, 0) + 1 < tile.parts()) return false;
    __threadfence();
    if (threadIdx.x % 32 == 0) *arrived = 0;  // for the next call
    return true;
  }

  // The weights of a part, and of all before it, take the place of its state.
  __device__ __forceinline__ Two weigh_parts() const {
    Two all = read(place_of_part(0).state), next = read(place_of_part(1).state);
#pragma unroll 1
    for (int n = 1; n < tile.parts(); ++n) {
      const Two part = next;
      if (n + 1 < tile.parts()) next = read(place_of_part(n + 1).state);
      const Weights w = add(all, part);
      __stcg(place_of_part(n).state, float4{w.before[0], w.after[0], w.before[1], w.after[1]});
    }
    return all;
  }

  // 32 columns at a time: registers are full of the next tile's scores.
  __device__ __forceinline__ void write_out(const FinishedRow<float> (&done)[2]) const {
#pragma unroll 1
    for (int eights = 0; eights < kV / 8; eights += 4) {
      float sum[16];
      const auto each = [&](int part, auto&& use) {
        const float* from = place_of_part(part).sums + 128 * eights;
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
      for (int part = 1; part < tile.parts(); ++part) {
        const float4 w = __ldcg(place_of_part(part).state);
        each(part, [&](float& to, float x, int i) { to = fmaf(x, i == 0 ? w.y : w.w, to * (i == 0 ? w.x : w.z)); });
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool here = valid(i);
        const int row = here ? tile.row + row_of(i) : 0, head = here ? tile.unit() * call.heads + head_of(i) : 0;
        const auto value = [&](int n, int j) { return fmaf(sum[4 * n + 2 * i + j], done[i].weight, 0.0f); };
        if (call.wide_out) {
          std::uint16_t* to = static_cast<std::uint16_t*>(call.out.data) + offset_of(call.out, row, head);
          store_eights<N, 32>(to, here, 8 * eights, call.out.dim, value);
        } else if (here) {
          const FloatRow to(call.out, row, head);
#pragma unroll
          for (int n = 0; n < 4; ++n) to.store(eights + n, value(n, 0), value(n, 1));
        }
      }
    }
  }
};

}  // namespace weft::cuda::sm90
