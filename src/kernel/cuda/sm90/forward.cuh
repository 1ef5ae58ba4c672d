// The forward on Hopper: one launch, as many blocks as multiprocessors, each taking tiles until there are none left.
//
// A tile is some query rows times the query heads of one K/V head. One warp of the block walks through its slices and
// fetches K and V by bulk tensor copies; two or three warpgroups multiply, each 64 rows. Steps of different tiles
// follow each other without a gap: the scores of the next tile are computed while the last products of this one run.
//
// In a step a warpgroup issues S = Q·K of this step and O += P·V of the last one, and makes P of S while the other
// warpgroups multiply. A row's bits depend on its keys alone: tiles of keys count from the slice's k_first, and a tile
// of which a row sees nothing leaves its state as it is.
#pragma once

#include <type_traits>

#include "cuda/launch.h"
#include "kernel/cuda/sm90/fetch.cuh"
#include "kernel/cuda/sm90/wgmma.cuh"

namespace weft::cuda::sm90 {

// tanh. Small ones by their series: a large softcap multiplies them, errors and all.
__device__ inline float bent(float x) {
  const float y = x * x;
  if (y < 0.01f) return x * fmaf(y, fmaf(y, 2.0f / 15, -1.0f / 3), 1.0f);
  return 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(x * (2 * kLog2E)));
}

// A 4 x 4 transpose within four lanes: lane c gets the c-th word of each.
__device__ inline void exchange(unsigned (&w)[4]) {
  const int lane = static_cast<int>(threadIdx.x);
  const auto swap = [&](unsigned& a, unsigned& b, int bit) {
    const bool upper = (lane & bit) != 0;
    const unsigned got = __shfl_xor_sync(0xffffffffu, upper ? a : b, bit);
    (upper ? a : b) = got;
  };
  swap(w[0], w[1], 1);
  swap(w[2], w[3], 1);
  swap(w[0], w[2], 2);
  swap(w[1], w[3], 2);
}

// What a lane has of a row of f32: two columns of each eight.
struct FloatRow {
  float* at;
  int columns;  // from the lane's first one on
  bool pairs;   // two are aligned as one, and the last one is not alone
  __device__ FloatRow(const TensorView& view, int row, int head) {
    const int first = 2 * static_cast<int>(threadIdx.x % 4);
    at = static_cast<float*>(view.data) + offset_of(view, row, head) + first;
    columns = static_cast<int>(view.dim) - first;
    pairs = reinterpret_cast<std::uintptr_t>(at) % 8 == 0 && view.dim % 2 == 0;
  }
  __device__ float2 load(int n) const {
    if (pairs) return 8 * n < columns ? *reinterpret_cast<const float2*>(at + 8 * n) : float2{0, 0};
    return {8 * n < columns ? at[8 * n] : 0.0f, 8 * n + 1 < columns ? at[8 * n + 1] : 0.0f};
  }
  __device__ void store(int n, float x, float y) const {
    if (pairs) {
      if (8 * n < columns) *reinterpret_cast<float2*>(at + 8 * n) = {x, y};
      return;
    }
    if (8 * n < columns) at[8 * n] = x;
    if (8 * n + 1 < columns) at[8 * n + 1] = y;
  }
};

template <class N, Width kWidth, bool kBent>
struct ForwardMath {
  static constexpr ForwardShape kShape = forward_shape(kWidth);
  static constexpr bool kBf16 = std::is_same_v<N, Bf16>;
  static constexpr int kKeys = kShape.keys, kGroups = kShape.groups, kV = kShape.v;

  const ForwardCall& call;
  const Shared<kWidth> shared;
  const int group;           // of warps
  int row_of[2], head_of[2];  // within a tile; what is computed of a row past it goes nowhere
  float o[kV / 2], s[kKeys / 2];
  unsigned p[kKeys / 4];
  float top[2], total[2];  // largest score; this lane's share of the sum
  float shrink[2];

  __device__ __forceinline__ ForwardMath(const ForwardCall& c, const Shared<kWidth>& sh, int g)
      : call(c), shared(sh), group(g) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = group * 64 + static_cast<int>(threadIdx.x % 128) / 32 * 16 + static_cast<int>(threadIdx.x % 32) / 4 +
                    8 * i;
      row_of[i] = m / call.heads;
      head_of[i] = m % call.heads;
      if (row_of[i] >= call.rows) row_of[i] = 0x3fff;
      top[i] = kMinusInfinity<float>;
      total[i] = 0;
    }
  }

  __device__ __forceinline__ void multiply_scores(int buffer, int stage) {
    const unsigned q = tile_at(shared.q(buffer) + static_cast<unsigned>(group) * 8192);
    const unsigned k = tile_at(shared.k(stage));
#pragma unroll
    for (int i = 0; i < kShape.k / 16; ++i)
      product<kBf16>(s, moved(q, static_cast<unsigned>(i / 4 * kShape.rows() * 128 + i % 4 * 32)),
                     moved(k, static_cast<unsigned>(i / 4 * kKeys * 128 + i % 4 * 32)), i > 0);
    products_commit();
  }
  __device__ __forceinline__ void multiply_values(int stage, bool add) {
    const unsigned v = tile_at<kKeys * 128>(shared.v(stage));
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      const unsigned a[4] = {p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
      product<kBf16>(o, a, moved(v, static_cast<unsigned>(i * 2048)), add || i > 0);
    }
    products_commit();
  }

  __device__ __forceinline__ void hide(const Step& step) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Seen seen = keys_of_row(step, row_of[i]);
      const int first = seen.first - 2 * static_cast<int>(threadIdx.x % 4);
      const unsigned span = seen.last >= seen.first ? static_cast<unsigned>(seen.last - seen.first) : 0u;
      const bool none = seen.last < seen.first;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (none || static_cast<unsigned>(8 * n + j - first) > span) s[4 * n + 2 * i + j] = kMinusInfinity<float>;
    }
  }

  // Scores become shares against the new maximum.
  __device__ __forceinline__ void make_shares() {
    const float factor = call.scores.factor;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = max_nan(s[2 * i], s[2 * i + 1]);
#pragma unroll
      for (int n = 1; n < kKeys / 8; ++n) most = max_nan(most, max_nan(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]));
      most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, 2));
      most = max_nan(top[i], most);
      // A row without keys so far: anything finite will do, and -inf - -inf would not.
      const float against = most == kMinusInfinity<float> ? 0.0f : __fmul_rn(most, factor);
      // Not fused: exactly 1 where the largest stays the largest.
      shrink[i] = exp2_fast(__fsub_rn(__fmul_rn(top[i], factor), against));
      top[i] = most;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float share = exp2_fast(fmaf(s[4 * n + 2 * i + j], factor, -against));
          s[4 * n + 2 * i + j] = share;
          sum += share;
        }
      total[i] = fmaf(total[i], shrink[i], sum);
    }
  }
  // Two ways that differ in their last word: the compiler would make one of them, and then move the wait for the
  // products with V from behind the shares to before them.
  __device__ __forceinline__ void softmax(const Step& step) {
    if constexpr (kBent) {
      const float bend = call.scores.bend * call.sign;
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) s[i] = bend != 0 ? bent(s[i] * bend) : s[i] * call.sign;
    }
    if ((step.flags & Step::kMasked) != 0) {
      hide(step);
      make_shares();
      settle(s);
      asm volatile("// some seen\n" ::: "memory");
    } else {
      make_shares();
      settle(s);
      asm volatile("// all seen\n" ::: "memory");
    }
  }
  __device__ __forceinline__ void round_shares() {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) {
      unsigned one[1];
      N::pack(one, s[2 * i], s[2 * i + 1]);
      p[i] = one[0];
    }
  }
  __device__ __forceinline__ void shrink_sums() {
    if (!__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;  // times 1
#pragma unroll
    for (int i = 0; i < kV / 2; ++i) o[i] *= shrink[i / 2 % 2];
  }

  // A finished tile to its rows.
  __device__ __forceinline__ void store(const StepTile& tile, const float (&most)[2], const float (&sums)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = sums[i];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int row = tile.row + row_of[i], head = tile.unit() * call.heads + head_of[i];
      const bool valid = row_of[i] < tile.rows();
      RowState<float> state;
      if (most[i] != kMinusInfinity<float>) state = {most[i] * (call.scores.factor * kLn2), sum};
      if (call.max_logit != nullptr && valid && threadIdx.x % 4 == 0 && !is_empty(state))
        atomicMax(call.max_logit + head, ordered(state.max));
      if (call.partial.states != nullptr) {
        if (valid && !is_empty(state)) merge_into(row, head, i, state);
        continue;
      }
      FinishedRow<float> done;
      if (valid) {
        done = finish(state, sink_logit(call.sink, head));
        if (threadIdx.x % 4 == 0 && call.lse.given())
          store_element(call.lse.data, call.lse.dtype, offset_of(call.lse, row, head), done.lse);
      }
      if (!valid && !call.wide_out) continue;
      // A row without keys: its sums are zeros times anything finite, or were never written.
      const bool empty = is_empty(state);
      // A zero that shrank to -0 is 0 again.
      const auto value = [&](int n, int j) { return empty ? 0.0f : o[4 * n + 2 * i + j] * done.weight + 0.0f; };
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
  __device__ __forceinline__ void merge_into(int row, int head, int i, const RowState<float>& state) {
    RowState<float>& kept = call.partial.states[static_cast<Index>(row) * call.heads_q + head];
    const RowState<float> old = kept;
    const MergedState<float> merged = merge(state, old);
    __syncwarp(0xfu << (threadIdx.x % 32 / 4 * 4));  // all four lanes have read it
    if (threadIdx.x % 4 == 0) kept = merged.state;
    const FloatRow to(call.partial.sums, row, head);
    const bool first = is_empty(old);
#pragma unroll
    for (int n = 0; n < kV / 8; ++n) {
      float x = o[4 * n + 2 * i] + 0.0f, y = o[4 * n + 2 * i + 1] + 0.0f;  // not -0
      if (!first) {
        const float2 before = to.load(n);
        x = merged(x, before.x);
        y = merged(y, before.y);
      }
      to.store(n, x, y);
    }
  }

  // Registers are written before this, and read after it, not where the compiler would like it better.
  template <class T, int kSize>
  __device__ __forceinline__ static void settle(T (&x)[kSize]) {
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      if constexpr (std::is_same_v<T, float>)
        asm volatile("" : "+f"(x[i])::"memory");
      else
        asm volatile("" : "+r"(x[i])::"memory");
  }
  __device__ __forceinline__ void begin_products() {
    settle(p);
    settle(o);
    products_begin();
  }

  // Warpgroups take turns at issuing products: while one multiplies, the others make shares.
  __device__ __forceinline__ void await_turn() const { named_sync(1 + group, 256); }
  __device__ __forceinline__ void pass_turn() const { named_arrive(1 + (group + 1) % kGroups, 256); }
  __device__ __forceinline__ bool leads() const { return threadIdx.x % 32 == 0; }

  __device__ __forceinline__ void run() {
    if (group == kGroups - 1) named_arrive(1, 256);  // the first one's turn
    Ring<kShape.stages> stage, before;
    Ring<kShape.q_buffers> buffer;
    wait(shared.k_full(0), 0);
    Step step = read_step(shared.step(0));
    if ((step.flags & Step::kStop) != 0) return;
    StepTile tile = read_tile(shared.step(0));
    wait(shared.q_full(0), 0);
    await_turn();
    begin_products();
    multiply_scores(0, 0);
    pass_turn();
    products_wait<0>();
    settle(s);
    release(step, stage, buffer);
    softmax(step);
    round_shares();
    bool fresh = true;  // the sums are another tile's
    while (true) {
      stage.next();
      wait(shared.k_full(stage.at), stage.parity);
      step = read_step(shared.step(stage.at));
      if ((step.flags & Step::kStop) != 0) break;
      const bool first = (step.flags & Step::kFirst) != 0;
      StepTile next_tile = tile;
      if (first) {
        next_tile = read_tile(shared.step(stage.at));
        wait(shared.q_full(buffer.at), buffer.parity);
      }
      wait(shared.v_full(before.at), before.parity);
      await_turn();
      begin_products();
      // The same in all lanes, and said so: descriptors are then made by the uniform half of the machine.
      const int where = static_cast<int>(
          __reduce_or_sync(0xffffffffu, static_cast<unsigned>(stage.at | before.at << 4 | buffer.at << 8 |
                                                              (fresh ? 1 << 12 : 0))));
      multiply_scores(where >> 8 & 15, where & 15);
      multiply_values(where >> 4 & 15, where >> 12 == 0);
      pass_turn();
      products_wait<1>();
      settle(s);
      release(step, stage, buffer);
      const float most[2] = {top[0], top[1]}, sums[2] = {total[0], total[1]};
      if (first) {
        top[0] = top[1] = kMinusInfinity<float>;
        total[0] = total[1] = 0;
      }
      softmax(step);
      products_wait<0>();
      settle(o);
      if (leads()) arrive(shared.v_free(before.at));
      before.next();
      if (first)
        store(tile, most, sums);
      else
        shrink_sums();
      fresh = first;
      tile = next_tile;
      round_shares();
    }
    wait(shared.v_full(before.at), before.parity);
    begin_products();
    multiply_values(before.at, !fresh);
    products_wait<0>();
    settle(o);
    store(tile, top, total);
  }
  // The scores are there: K is read, and Q if that was its last tile of keys.
  __device__ __forceinline__ void release(const Step& step, const Ring<kShape.stages>& stage,
                                          Ring<kShape.q_buffers>& buffer) const {
    const bool last = (step.flags & Step::kLast) != 0;
    if (leads()) {
      arrive(shared.k_free(stage.at));
      if (last) arrive(shared.q_free(buffer.at));
    }
    if (last) buffer.next();
  }
};

template <class N, Width kWidth, bool kBent>
__global__ void __launch_bounds__(forward_shape(kWidth).threads(), 1)
    forward_kernel(const __grid_constant__ ForwardCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr ForwardShape kShape = forward_shape(kWidth);
  extern __shared__ __align__(1024) unsigned char memory[];
  const Shared<kWidth> shared{shared_address(memory)};
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == 0) {
    give_registers<kShape.fetch_registers>();
    if (threadIdx.x == 0) fetch<kWidth>(call, shared);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp == 1) mend<kWidth>(shared);
    if (warp >= 2) clear_rest(call);
  } else {
    take_registers<kShape.math_registers>();
    ForwardMath<N, kWidth, kBent>(call, shared, group - 1).run();
  }
#else
  __trap();  // compiled for another GPU: the registry does not come here
#endif
}

template <class N, Width kWidth, bool kBent>
void launch_forward(const ForwardCall& call, cudaStream_t stream) {
  constexpr ForwardShape kShape = forward_shape(kWidth);
  const int blocks = min(call.tiles * call.units, call.processors);
  launch(&forward_kernel<N, kWidth, kBent>,
         {dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(kShape.threads())),
          static_cast<std::size_t>(kShape.shared_bytes())},
         stream, call);
}

template <class N, Width kWidth>
void launch_width(const ForwardCall& call, cudaStream_t stream) {
  const bool bent = call.scores.bend != 0 || call.sign != 1.0f;
  (bent ? launch_forward<N, kWidth, true> : launch_forward<N, kWidth, false>)(call, stream);
}

template <class N>
void launch_any(Width width, const ForwardCall& call, cudaStream_t stream) {
  switch (width) {
    case Width::w64:
      launch_width<N, Width::w64>(call, stream);
      break;
    case Width::w128:
      launch_width<N, Width::w128>(call, stream);
      break;
    case Width::w192_128:
      launch_width<N, Width::w192_128>(call, stream);
      break;
    default:
      launch_width<N, Width::w256>(call, stream);
  }
}

}  // namespace weft::cuda::sm90
