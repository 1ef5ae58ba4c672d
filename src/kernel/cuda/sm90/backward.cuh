// The backward on Hopper: a block owns 128 keys of one K/V head, and all query rows that see them pass by, for all heads
// of the group. dK and dV stay in registers, are written once, and have the same bits on every run.
//
// A warpgroup has 64 keys. S^T = K·Q^T and dP^T = V·dO^T are its sums, so P^T and dS^T are in its registers as dV += P^T·dO
// and dK += dS^T·Q want them. dS alone goes through shared memory, for dQ = dS·K, of which each warpgroup makes a part from
// all 128 keys: one step late, when the other one's dS is there for sure, and added to f32 sums in device memory.
#pragma once

#include <type_traits>

#include "cuda/launch.h"
#include "kernel/cuda/scores.cuh"
#include "kernel/cuda/sm90/backward_fetch.cuh"
#include "kernel/cuda/sm90/wgmma.cuh"

namespace weft::cuda::sm90 {

// tanh, and what is left of 1 beside its square. Small ones by their series: a large softcap multiplies them.
__device__ inline float bent_score(float x, float& slope) {
  const float y = x * x;
  const float far = 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(x * (2 * kLog2E)));
  const float bent = y < 0.01f ? x * fmaf(y, fmaf(y, 2.0f / 15, -1.0f / 3), 1.0f) : far;
  slope = (1.0f - bent) * (1.0f + bent);
  return bent;
}

// Registers are written before this, and read after it, not where the compiler would like it better.
template <class T, int kSize>
__device__ __forceinline__ void settled(T (&x)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i)
    if constexpr (std::is_same_v<T, float>)
      asm volatile("" : "+f"(x[i])::"memory");
    else
      asm volatile("" : "+r"(x[i])::"memory");
}

// A 4 x 4 transpose within four lanes: lane c gets the c-th word of each.
__device__ inline void transpose_words(unsigned (&w)[4]) {
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

template <class N, Width kWidth, bool kBent>
struct BackwardMath {
  static constexpr BackwardShape kShape = backward_shape(kWidth);
  static constexpr bool kBf16 = std::is_same_v<N, Bf16>;
  static constexpr int kK = kShape.k, kV = kShape.v, kRows = kShape.rows(), kKeys = BackwardShape::kKeys;
  static constexpr int kStages = kShape.stages;
  // dQ of a warpgroup: half the columns of 64 rows, or half of 128 rows.
  static constexpr int kOwn = kRows == 64 ? kK / 2 : kK;

  const BackwardCall& call;
  const BackwardShared<kWidth> shared;
  const int group;  // of warps
  float dk[kK / 2], dv[kV / 2];

  __device__ __forceinline__ BackwardMath(const BackwardCall& c, const BackwardShared<kWidth>& sh, int g)
      : call(c), shared(sh), group(g) {
#pragma unroll
    for (int i = 0; i < kK / 2; ++i) dk[i] = 0;
#pragma unroll
    for (int i = 0; i < kV / 2; ++i) dv[i] = 0;
  }

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x % 128) / 32; }
  __device__ __forceinline__ int first_key() const { return group * 64 + warp() * 16 + lane() / 4; }  // and 8 behind

  // Sums [64 keys][rows]: keys' rows of K or V times those of Q or dO.
  template <int kColumns>
  __device__ __forceinline__ void multiply_rows(float (&sums)[kRows / 2], unsigned keys, unsigned rows) const {
    const unsigned a = tile_at(keys + static_cast<unsigned>(group) * 8192), b = tile_at(rows);
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i)
      product<kBf16>(sums, moved(a, static_cast<unsigned>(i / 4 * kKeys * 128 + i % 4 * 32)),
                     moved(b, static_cast<unsigned>(i / 4 * kRows * 128 + i % 4 * 32)), i > 0);
    products_commit();
  }
  // Sums [64 keys][columns] += of[keys][rows] · rows.
  template <int kColumns>
  __device__ __forceinline__ void add_rows(float (&sums)[kColumns / 2], const unsigned (&of)[kRows / 4], unsigned rows) {
    const unsigned b = tile_at<kRows * 128>(rows);
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      const unsigned a[4] = {of[4 * i], of[4 * i + 1], of[4 * i + 2], of[4 * i + 3]};
      product<kBf16>(sums, a, moved(b, static_cast<unsigned>(i * 2048)), true);
    }
  }
  __device__ __forceinline__ void multiply_dq(float (&sums)[kOwn / 2], int buffer) const {
    const unsigned box = static_cast<unsigned>(group) * (kKeys * 128);
    const unsigned a = tile_at(shared.ds(buffer) + (kRows == 64 ? 0u : box));
    const unsigned b = tile_at<kKeys * 128>(shared.k() + (kRows == 64 ? kOwn / 64 * box : 0u));
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
      product_columns<kBf16>(sums, moved(a, static_cast<unsigned>(i * 2048)), moved(b, static_cast<unsigned>(i * 2048)),
                             i > 0);
    products_commit();
  }

  __device__ __forceinline__ static float2 load_pair(unsigned at) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];\n" : "=f"(x.x), "=f"(x.y) : "r"(at));
    return x;
  }

  // Scores become shares, and with softcap also what dS is multiplied by: `s` has that then.
  __device__ __forceinline__ void make_shares(float (&s)[kRows / 2], unsigned (&p)[kRows / 4], const RowStep& step,
                                              int stage) const {
    const unsigned lse = shared.lse(stage) + static_cast<unsigned>(lane() % 4) * 8;
    const float factor = call.scores.factor;
    unsigned slopes[kBent ? kRows / 4 : 1];
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float2 x = load_pair(lse + static_cast<unsigned>(n * 32));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float slope[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& score = s[4 * n + 2 * i + j];
          if constexpr (kBent) score = bent_score(score * call.scores.bend, slope[j]);
          score = exp2_fast(fmaf(score, factor, -(j == 0 ? x.x : x.y)));
        }
        if constexpr (kBent) slopes[2 * n + i] = packed(slope[0], slope[1]);
      }
    }
    if ((step.flags & RowStep::kMasked) != 0) hide(s, step);
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      p[i] = packed(s[2 * i], s[2 * i + 1]);
      if constexpr (kBent) {
        const float2 slope = unpacked(slopes[i]);
        s[2 * i] *= slope.x;
        s[2 * i + 1] *= slope.y;
      }
    }
  }
  __device__ __forceinline__ void hide(float (&s)[kRows / 2], const RowStep& step) const {
    const int log_heads = call.rows.log_heads;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Seen seen = rows_of_key(step, first_key() + 8 * i);
      const bool none = seen.last < seen.first;
      const int first = (seen.first << log_heads) - 2 * (lane() % 4);
      const unsigned count = none ? 0u : static_cast<unsigned>((seen.last - seen.first + 1) << log_heads);
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (static_cast<unsigned>(8 * n + j - first) >= count) s[4 * n + 2 * i + j] = 0;
    }
  }
  // dS = P·(dP - delta), with the scale before it is rounded, so that f16 holds what it can.
  __device__ __forceinline__ void make_ds(unsigned (&ds)[kRows / 4], const float (&p)[kRows / 2],
                                          const float (&dp)[kRows / 2], int stage) const {
    const unsigned delta = shared.delta(stage) + static_cast<unsigned>(lane() % 4) * 8;
    const float scale = call.scale;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float2 x = load_pair(delta + static_cast<unsigned>(n * 32));
#pragma unroll
      for (int i = 0; i < 2; ++i)
        ds[2 * n + i] = packed(p[4 * n + 2 * i] * fmaf(dp[4 * n + 2 * i], scale, -x.x),
                               p[4 * n + 2 * i + 1] * fmaf(dp[4 * n + 2 * i + 1], scale, -x.y));
    }
  }
  // dS^T to shared memory, [key][row].
  __device__ __forceinline__ void keep_ds(const unsigned (&ds)[kRows / 4], int buffer) const {
    const int key = group * 64 + warp() * 16 + lane() % 16;
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      const int piece = 2 * (i % 4) + lane() / 16;
      const unsigned to = shared.ds(buffer) + static_cast<unsigned>(i / 4 * kKeys * 128 + key * 128 +
                                                                    ((piece ^ (key & 7)) << 4));
      const unsigned four[4] = {ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]};
      store_matrices(to, four);
    }
  }
  __device__ __forceinline__ void add_dq(const float (&x)[kOwn / 2], int tile) const {
    float* to = call.dq_sums + static_cast<Index>(tile) * (kRows * kK) + group * (64 * kOwn) +
                static_cast<int>(threadIdx.x % 128) * 4;
#pragma unroll
    for (int j = 0; j < kOwn / 8; ++j) {
      const float four[4] = {x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]};
      add_four(to + j * 512, four);
    }
  }

  __device__ __forceinline__ static unsigned packed(float x, float y) {
    unsigned one[1];
    N::pack(one, x, y);
    return one[0];
  }
  __device__ __forceinline__ static float2 unpacked(unsigned x) {
    if constexpr (kBf16)
      return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
    else
      return __half22float2(*reinterpret_cast<const __half2*>(&x));
  }
  __device__ __forceinline__ static bool leads() { return threadIdx.x % 32 == 0; }

  __device__ __forceinline__ void run() {
    StageRing<kStages> stage;
    StageRing<2> ds;     // where dS of this step goes
    int late = -1;       // tile of dQ of the last step
    bool last;
    wait(shared.keys_full(), 0);
    do {
      float s[kRows / 2], dp[kRows / 2];
      unsigned p[kRows / 4], g[kRows / 4];
      wait(shared.q_full(stage.at), stage.parity);
      const RowStep step = read_row_step(shared.step(stage.at));
      // The same in all lanes, and said so: descriptors are then made by the uniform half of the machine.
      const int where =
          static_cast<int>(__reduce_or_sync(0xffffffffu, static_cast<unsigned>(stage.at | ds.at << 4)));
      const int at = where & 15, buffer = where >> 4;
      products_begin();
      multiply_rows<kK>(s, shared.k(), shared.q(at));
      wait(shared.dout_full(stage.at), stage.parity);
      products_begin();
      multiply_rows<kV>(dp, shared.v(), shared.dout(at));
      products_wait<1>();
      settled(s);
      make_shares(s, p, step, at);
      products_wait<0>();
      settled(dp);
      make_ds(g, s, dp, at);
      wait(shared.ds_free(ds.at), ds.parity ^ 1);
      keep_ds(g, buffer);
      stores_visible();
      __syncwarp();
      if (leads()) arrive(shared.ds_full(ds.at));
      const bool has_late = late >= 0;
      if (has_late) wait(shared.ds_full(ds.at ^ 1), ds.parity ^ (ds.at == 0 ? 1u : 0u));
      float dq[kOwn / 2];
      settled(p);
      settled(g);
      products_begin();
      add_rows<kV>(dv, p, shared.dout(at));
      add_rows<kK>(dk, g, shared.q(at));
      products_commit();
      multiply_dq(dq, buffer ^ 1);  // of the first step: of nothing, for nothing
      products_wait<1>();
      if (leads()) {
        arrive(shared.q_free(stage.at));
        arrive(shared.dout_free(stage.at));
      }
      products_wait<0>();
      settled(dq);
      if (has_late) {
        if (leads()) arrive(shared.ds_free(ds.at ^ 1));
        add_dq(dq, late);
      }
      late = step.sums;
      last = (step.flags & RowStep::kLast) != 0;
      stage.next();
      ds.next();
    } while (!last);
    float dq[kOwn / 2];
    wait(shared.ds_full(ds.at ^ 1), ds.parity ^ (ds.at == 0 ? 1u : 0u));
    products_begin();
    multiply_dq(dq, ds.at ^ 1);
    products_wait<0>();
    settled(dq);
    settled(dk);
    settled(dv);
    add_dq(dq, late);
  }

  // A finished tile to its keys.
  template <int kColumns>
  __device__ __forceinline__ void store(const TensorView& to, bool wide, const float (&sums)[kColumns / 2], int tile,
                                        int kv_head, int2 keys, bool used) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = keys.x + first_key() + 8 * i;
      const bool inside = key < keys.y, live = inside && used && key_is_live(call.keys, tile, key);
      const auto value = [&](int n, int j) { return live ? sums[4 * n + 2 * i + j] : 0.0f; };
      if (!wide) {
        if (!inside || (call.add_keys && !live)) continue;
        const int first = 2 * (lane() % 4), columns = static_cast<int>(to.dim) - first;
        float* at = static_cast<float*>(to.data) + offset_of(to, key, kv_head) + first;
        const bool pairs = reinterpret_cast<std::uintptr_t>(at) % 8 == 0 && to.dim % 2 == 0;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          float2 x = {value(n, 0), value(n, 1)};
          if (pairs && 8 * n < columns) {
            float2* const both = reinterpret_cast<float2*>(at + 8 * n);
            if (call.add_keys) x = {both->x + x.x, both->y + x.y};
            *both = x;
          } else {
            if (8 * n < columns) at[8 * n] = call.add_keys ? at[8 * n] + x.x : x.x;
            if (8 * n + 1 < columns) at[8 * n + 1] = call.add_keys ? at[8 * n + 1] + x.y : x.y;
          }
        }
        continue;
      }
      std::uint16_t* at = static_cast<std::uint16_t*>(to.data) + (inside ? offset_of(to, key, kv_head) : 0);
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += 4) {
        unsigned w[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = packed(value(n + j, 0), value(n + j, 1));
        transpose_words(w);
        const int column = 8 * (n + lane() % 4);
        if (inside && column < to.dim) *reinterpret_cast<uint4*>(at + column) = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
  }
};

template <class N, Width kWidth, bool kBent>
__global__ void __launch_bounds__(BackwardShape::kThreads, 1) backward_kernel(const __grid_constant__ BackwardCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  const BackwardShared<kWidth> shared{shared_address(memory)};
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  // Head by head: the dQ that is being added to stays in the L2 cache.
  const int item = static_cast<int>(blockIdx.x), kv_head = call.active == 0 ? 0 : item / call.active;
  const int tile = kv_head < call.heads_k && call.active > 0 ? call.keys.order[item % call.active] : -1;
  const bool work = tile >= 0 && call.keys.ranges[tile].x < call.keys.ranges[tile].y;
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == 0) {
    give_registers<BackwardShape::kFetchRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp == 0 && work) fetch_tile<kWidth>(call, shared, tile, kv_head);
    if (warp >= 2 && !call.add_keys) {
      clear_keys(call, call.dk, call.wide_dk);
      clear_keys(call, call.dv, call.wide_dv);
    }
  } else {
    take_registers<BackwardShape::kMathRegisters>();
    if (!work) return;
    BackwardMath<N, kWidth, kBent> math(call, shared, group - 1);
    const bool used = call.heads.begin[kv_head] < call.heads.begin[kv_head + 1];
    if (used) math.run();
    const int2 keys = keys_of_tile(call, tile);
    math.template store<backward_shape(kWidth).k>(call.dk, call.wide_dk, math.dk, tile, kv_head, keys, used);
    math.template store<backward_shape(kWidth).v>(call.dv, call.wide_dv, math.dv, tile, kv_head, keys, used);
  }
#else
  __trap();  // compiled for another GPU: the registry does not come here
#endif
}

template <class N, Width kWidth>
void launch_width(const BackwardCall& call, cudaStream_t stream) {
  constexpr BackwardShape kShape = backward_shape(kWidth);
  static_assert(kShape.shared_bytes() <= 227 * 1024);
  if (call.key_tiles == 0) return;
  const int blocks = max(1, call.active * call.heads_k);  // one at least, for keys that nobody sees
  launch(call.scores.bend != 0 ? &backward_kernel<N, kWidth, true> : &backward_kernel<N, kWidth, false>,
         {dim3(static_cast<unsigned>(blocks)), dim3(BackwardShape::kThreads),
          static_cast<std::size_t>(kShape.shared_bytes())},
         stream, call);
}

template <class N>
void launch_any(Width width, const BackwardCall& call, cudaStream_t stream) {
  if (width == Width::w64)
    launch_width<N, Width::w64>(call, stream);
  else
    launch_width<N, Width::w128>(call, stream);
}

}  // namespace weft::cuda::sm90
