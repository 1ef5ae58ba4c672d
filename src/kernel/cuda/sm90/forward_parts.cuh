// Keys in parts (KeyParts): what a warpgroup knows of a tile's rows after a part goes to memory, and when all parts are
// there, they are merged in their order and written out.
#pragma once

#include "kernel/cuda/sm90/forward_rows.cuh"

namespace weft::cuda::sm90 {

template <class N, Width kWidth, Form kForm>
struct ForwardParts : ForwardRows<N, kWidth, kForm> {
  using Base = ForwardRows<N, kWidth, kForm>;
  using typename Base::Kept;
  using typename Base::Rows;
  using Base::call, Base::group, Base::head_of, Base::kShape, Base::kUnseen, Base::kV, Base::lane_in_sums, Base::o, Base::row_of,
      Base::tile;

  __device__ __forceinline__ ForwardParts(const ForwardCall& c, const Shared<kWidth>& sh, int g) : Base(c, sh, g) {}

  // A finished tile, or a part of one.
  __device__ __forceinline__ void store(const Rows& rows, const Kept& kept) {
    if constexpr (takes_parts(kForm))
      if (tile.parts() > 1) return store_part(rows);
    Base::store(rows, kept);
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
  __device__ __forceinline__ Index tile_and_unit() const { return static_cast<Index>(tile.unit()) * call.tiles + tile.tile; }
  __device__ __forceinline__ Place place_of_part(int part) const {
    const Index first = call.parts.together ? tile_and_unit() : static_cast<Index>(blockIdx.x);
    const Index block = first * call.parts.most + part;
    return {call.parts.sums + block * (kShape.rows() * kV) + lane_in_sums(),
            call.parts.states + block * (2 * kShape.rows()) + group * 128 + static_cast<int>(threadIdx.x % 128)};
  }

  __device__ __forceinline__ void store_part(const Rows& rows) {
    if (!__any_sync(0xffffffffu, valid(0))) return;  // a warp without rows
    write_part(rows);
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

  // Of rows that see none of the part's keys: zeros times anything are in o.
  __device__ __forceinline__ void write_part(const Rows& rows) {
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
    const Place to = place_of_part(tile.part());
    *to.state = {now.of[0].max, now.of[0].sum, now.of[1].max, now.of[1].sum};
    const bool none[2] = {is_empty(now.of[0]), is_empty(now.of[1])};
#pragma unroll
    for (int n = 0; n < kV / 8; ++n)
      *reinterpret_cast<float4*>(to.sums + 128 * n) = {none[0] ? 0 : o[4 * n], none[0] ? 0 : o[4 * n + 1],
                                                       none[1] ? 0 : o[4 * n + 2], none[1] ? 0 : o[4 * n + 3]};
  }

  // Are the warp's rows there of all parts? Where one block has them all, its lanes wrote what they will read.
  __device__ __forceinline__ bool is_last() const {
    if (!call.parts.together) return tile.part() + 1 == tile.parts();
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

  // Parts are added one after another: all before it times one weight, and the part times another, which take the place of
  // its state. An empty one changes nothing. Reads go past the L1 cache: other blocks wrote that.
  __device__ __forceinline__ Two weigh_parts() const {
    const auto read = [&](int part) {
      const float4 x = __ldcg(place_of_part(part).state);
      return Two{{{x.x, x.y}, {x.z, x.w}}};
    };
    Two all = read(0), next = read(1);
#pragma unroll 1
    for (int n = 1; n < tile.parts(); ++n) {
      const Two part = next;
      if (n + 1 < tile.parts()) next = read(n + 1);
      float before[2], after[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const RowState<float> a = all.of[i], b = part.of[i];
        const float most = is_empty(a) ? b.max : is_empty(b) ? a.max : max_nan(a.max, b.max);
        before[i] = is_empty(a) ? 0.0f : exp2_fast(__fsub_rn(a.max, most));
        after[i] = is_empty(b) ? 0.0f : exp2_fast(__fsub_rn(b.max, most));
        all.of[i] = {most, fmaf(b.sum, after[i], a.sum * before[i])};
      }
      __stcg(place_of_part(n).state, float4{before[0], after[0], before[1], after[1]});
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
