// dQ by the owner of its rows: as the forward goes through keys, with two products more. A block has 128 rows times
// heads, a warpgroup 64 of them: S = Q·K^T and dP = dO·V^T are its sums, and dS stays in its registers for dQ += dS·K.
#pragma once

#include "cuda/launch.h"
#include "kernel/cuda/sm90/backward/producer.cuh"
#include "kernel/cuda/sm90/fragments.cuh"
#include "kernel/cuda/sm90/ptx/wgmma.cuh"

namespace weft::cuda::sm90 {

template <Width kWidth>
struct DqShared {
  static constexpr DqShape kShape = dq_shape(kWidth);
  static constexpr int kStages = kShape.stages;
  static constexpr unsigned kDoutAt = kShape.q_bytes(), kKAt = kDoutAt + kShape.dout_bytes(),
                            kVAt = kKAt + kStages * kShape.k_bytes(), kStepAt = kVAt + kStages * kShape.v_bytes(),
                            kBarrierAt = kStepAt + kStages * DqShape::kStepBytes;
  unsigned base;

  __device__ static unsigned times(int n, int bytes) { return static_cast<unsigned>(n * bytes); }
  __device__ unsigned q(int group) const { return base + times(group, kShape.q_bytes() / 2); }
  __device__ unsigned dout(int group) const { return base + kDoutAt + times(group, kShape.dout_bytes() / 2); }
  __device__ unsigned k(int s) const { return base + kKAt + times(s, kShape.k_bytes()); }
  __device__ unsigned v(int s) const { return base + kVAt + times(s, kShape.v_bytes()); }
  __device__ unsigned step(int s) const { return base + kStepAt + times(s, DqShape::kStepBytes); }
  __device__ unsigned barrier(int n) const { return base + kBarrierAt + times(n, 8); }
  __device__ unsigned rows_full() const { return barrier(0); }
  __device__ unsigned keys_full(int s) const { return barrier(1 + s); }
  __device__ unsigned keys_raw(int s) const { return barrier(1 + kStages + s); }
  __device__ unsigned keys_free(int s) const { return barrier(1 + 2 * kStages + s); }
  __device__ void init() const {
    barrier_init(rows_full(), 1);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(keys_full(s), 1);
      barrier_init(keys_raw(s), 1);
      barrier_init(keys_free(s), 8 * kArrivalsOfWarp);
    }
    barriers_ready();
  }
};

__device__ inline DqItem dq_item(const DqCall& call, int n) {
  if (call.items != nullptr) return call.items[n];
  const int block = call.rows.list.order[n], log = call.rows.log_size;
  const int2 range = call.rows.list.ranges[block];
  return {(block * call.rows.listed) << log, min(((block + 1) * call.rows.listed) << log, call.q_rows), range.x,
          range.y, block * call.rows.listed};
}

// The tiles of keys that the rows of an item see, slice by slice, counted from the slice's k_first: a row's bits do not
// depend on where its tile begins.
template <int kKeys>
class DqWalk {
 public:
  __device__ DqWalk(const DqCall& call, const DqItem& item)
      : slices_(call.items != nullptr ? call.slices : call.rows.list.slices), item_(item), member_(item.first) {}
  __device__ bool start() { return enter(); }
  __device__ bool next() {
    key_ += kKeys;
    if (key_ < stop_) return true;
    ++member_;
    return enter();
  }
  __device__ int key() const { return key_; }
  __device__ RowStep step(int k_rows) const {
    constexpr int kFar = 0x3fff;
    const WorkSlice& s = slice_;
    const int row = item_.begin, rows = item_.end - row;
    const bool all = row >= s.q_begin && row + rows <= s.q_end && key_ >= s.k_begin && key_ + kKeys <= s.k_end &&
                     key_ - (row + rows - 1) >= s.lo && key_ + kKeys - 1 - row <= s.hi;
    const bool mended = key_ < s.k_begin || (key_ + kKeys > s.k_end && s.k_end < k_rows);
    const long long shift = static_cast<long long>(row) - key_;
    const auto near = [](long long x) { return static_cast<int>(x < -kFar ? -kFar : x > kFar ? kFar : x); };
    return {(all ? 0 : RowStep::kMasked) | (mended ? RowStep::kMended : 0),
            RowStep::pair(max(0, s.q_begin - row), min(rows, s.q_end - row)),
            RowStep::pair(max(0, s.k_begin - key_), min(kKeys, s.k_end - key_)),
            RowStep::pair(near(s.lo + shift), near(s.hi + shift)), 0};
  }

 private:
  __device__ bool enter() {
    for (; member_ < item_.last; ++member_) {
      slice_ = read(slices_, member_);
      const WorkSlice& s = slice_;
      const long long first = max(s.q_begin, item_.begin), last = min(s.q_end, item_.end) - 1;
      const int begin = within_int(max(static_cast<long long>(s.k_begin), first + s.lo));
      stop_ = within_int(min(static_cast<long long>(s.k_end), last + s.hi + 1));
      key_ = s.k_first + (begin - s.k_first) / kKeys * kKeys;
      if (first <= last && begin < stop_) return true;
    }
    return false;
  }

  const WorkSlice* slices_;
  const DqItem& item_;
  WorkSlice slice_;
  int member_, key_, stop_;
};

// A warp.
template <Width kWidth>
__device__ void fetch_dq(const DqCall& call, const DqShared<kWidth>& shared, const DqItem& item, int head,
                         int kv_head) {
  constexpr DqShape kShape = dq_shape(kWidth);
  constexpr int kTileRows = backward_shape(kWidth).rows(), kKeys = kShape.keys;
  const int lane = static_cast<int>(threadIdx.x % 32);
  Ring<kShape.stages> stage;
  unsigned raw_parity = 0;  // a bit a stage
  DqWalk<kKeys> walk(call, item);
  bool more = walk.start();
  if (more && lane == 0) {
    const int tiles = item.end - item.begin > call.rows.size() ? tiles_of_dq(kWidth) : 1;
    arrive_expecting(shared.rows_full(), static_cast<unsigned>(tiles * 2 * kTileRows * (kShape.k + kShape.v)));
    for (int t = 0; t < tiles; ++t) {
      const int row = item.begin + (t << call.rows.log_size);
      load_boxes<kShape.k>(shared.q(t), call.q, shared.rows_full(), kTileRows, head, row);
      load_boxes<kShape.v>(shared.dout(t), call.dout, shared.rows_full(), kTileRows, head, row);
    }
  }
  __syncwarp();
  while (more) {
    RowStep step = walk.step(call.k_rows);
    const int key = walk.key();
    more = walk.next();
    if (!more) step.flags |= RowStep::kLast;
    const bool mended = (step.flags & RowStep::kMended) != 0;
    const unsigned ready = mended ? shared.keys_raw(stage.at) : shared.keys_full(stage.at);
    wait(shared.keys_free(stage.at), stage.parity ^ 1);
    if (lane == 0) {
      write_four(shared.step(stage.at), step.flags, step.rows, step.keys, step.band);
      arrive_expecting(ready, kShape.k_bytes() + kShape.v_bytes());
      load_boxes<kShape.k>(shared.k(stage.at), call.k, ready, kKeys, kv_head, key);
      load_boxes<kShape.v>(shared.v(stage.at), call.v, ready, kKeys, kv_head, key);
    }
    __syncwarp();
    if (mended) {
      wait(ready, raw_parity >> stage.at & 1);
      raw_parity ^= 1u << stage.at;
      const int begin = RowStep::low(step.keys), end = RowStep::high(step.keys);
      const auto dead = [&](int r) { return r < begin || r >= end; };
      clear_rows<kKeys, kShape.k>(shared.k(stage.at), dead);
      clear_rows<kKeys, kShape.v>(shared.v(stage.at), dead);
      stores_visible();
      __syncwarp();
      if (lane == 0) arrive(shared.keys_full(stage.at));
    }
    stage.next();
  }
}

template <class N, Width kWidth, bool kBent>
struct DqMath {
  static constexpr DqShape kShape = dq_shape(kWidth);
  static constexpr bool kBf16 = std::is_same_v<N, Bf16>;
  static constexpr int kK = kShape.k, kV = kShape.v, kKeys = kShape.keys;
  // Boxes of rows: of one tile of the backward, which may hold both warpgroups' rows.
  static constexpr int kBoxRows = backward_shape(kWidth).rows();

  const DqCall& call;
  const DqShared<kWidth> shared;
  const int group;
  float sums[kK / 2];

  __device__ __forceinline__ DqMath(const DqCall& c, const DqShared<kWidth>& sh, int g)
      : call(c), shared(sh), group(g) {
#pragma unroll
    for (int i = 0; i < kK / 2; ++i) sums[i] = 0;
  }
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ __forceinline__ int place(int i) const {  // of a lane's two rows times heads
    return group * 64 + static_cast<int>(threadIdx.x % 128) / 32 * 16 + lane() / 4 + 8 * i;
  }

  template <int kColumns>
  __device__ __forceinline__ void multiply_rows(float (&to)[kKeys / 2], unsigned rows, unsigned keys) const {
    const unsigned a = tile_at(rows), b = tile_at(keys);
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i)
      product<kBf16>(to, moved(a, static_cast<unsigned>(i / 4 * kBoxRows * 128 + i % 4 * 32)),
                     moved(b, static_cast<unsigned>(i / 4 * kKeys * 128 + i % 4 * 32)), i > 0);
    products_commit();
  }
  __device__ __forceinline__ void add_keys(const unsigned (&ds)[kKeys / 4], unsigned keys) {
    const unsigned b = tile_at<kKeys * 128>(keys);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      const unsigned a[4] = {ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]};
      product<kBf16>(sums, a, moved(b, static_cast<unsigned>(i * 2048)), true);
    }
    products_commit();
  }
  // Scores become what dP - delta is multiplied by.
  __device__ __forceinline__ void make_shares(float (&s)[kKeys / 2], const float (&lse)[2], unsigned at) const {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      float slope = 1;
      if constexpr (kBent) s[i] = bent_score(s[i] * call.scores.bend, slope);
      s[i] = exp2_fast(fmaf(s[i], call.scores.factor, -lse[i / 2 % 2]));
      if constexpr (kBent) s[i] *= slope;
    }
    if ((read_word(at) & RowStep::kMasked) == 0) return;
    int flags, rows, keys, band;
    asm volatile("ld.shared.v4.s32 {%0,%1,%2,%3}, [%4];\n" : "=r"(flags), "=r"(rows), "=r"(keys), "=r"(band) : "r"(at));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = place(i) >> call.rows.log_heads;
      const bool inside = row >= RowStep::low(rows) && row < RowStep::high(rows);
      const int first = max(RowStep::low(keys), RowStep::low(band) + row);
      const int last = inside ? min(RowStep::high(keys) - 1, RowStep::high(band) + row) : first - 1;
      const unsigned count = static_cast<unsigned>(max(0, last - first + 1));
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (static_cast<unsigned>(8 * n + 2 * (lane() % 4) + j - first) >= count) s[4 * n + 2 * i + j] = 0;
    }
  }
  __device__ __forceinline__ void await_turn() const { named_sync(1 + group, 256); }
  __device__ __forceinline__ void pass_turn() const { named_arrive(2 - group, 256); }

  __device__ __forceinline__ void run(const float (&lse)[2], const float (&delta)[2]) {
    if (group == 1) named_arrive(1, 256);  // the first one's turn
    Ring<kShape.stages> stage;
    bool last;
    wait(shared.rows_full(), 0);
    do {
      float s[kKeys / 2], dp[kKeys / 2];
      unsigned ds[kKeys / 4];
      // The same in all lanes, and said so: descriptors are then made by the uniform half of the machine.
      const int at = kShape.stages == 1 ? 0 : static_cast<int>(same_in_all_lanes(static_cast<unsigned>(stage.at)));
      wait(shared.keys_full(at), stage.parity);
      await_turn();
      products_begin();
      multiply_rows<kK>(s, shared.q(group), shared.k(at));
      multiply_rows<kV>(dp, shared.dout(group), shared.v(at));
      pass_turn();
      products_wait<1>();
      settle(s);
      make_shares(s, lse, shared.step(at));
      last = (read_word(shared.step(at)) & RowStep::kLast) != 0;
      products_wait<0>();
      settle(dp);
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i)
        ds[i] = packed_pair<N>(s[2 * i] * fmaf(dp[2 * i], call.scale, -delta[i % 2]),
                               s[2 * i + 1] * fmaf(dp[2 * i + 1], call.scale, -delta[i % 2]));
      await_turn();
      settle(ds);
      products_begin();
      add_keys(ds, shared.k(at));
      pass_turn();
      products_wait<0>();
      if (arrives()) arrive(shared.keys_free(at));
      stage.next();
    } while (!last);
    settle(sums);
  }

  __device__ __forceinline__ void store(const DqItem& item, int head, const float (&lse)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = item.begin + (place(i) >> call.rows.log_heads);
      const int own = head + (place(i) & (call.rows.heads() - 1));
      const bool inside = row < item.end, seeing = !isinf(lse[i]);
      const auto value = [&](int n, int j) { return seeing ? sums[4 * n + 2 * i + j] : 0.0f; };
      if (!call.wide) {
        if (!inside) continue;
        const RowOut to(call.dq, row, own);
#pragma unroll
        for (int n = 0; n < kK / 8; ++n) to.store(8 * n + 2 * (lane() % 4), value(n, 0), value(n, 1));
        continue;
      }
      std::uint16_t* at = static_cast<std::uint16_t*>(call.dq.data) + (inside ? offset_of(call.dq, row, own) : 0);
      store_eights<N, kK>(at, inside, 0, call.dq.dim, value);
    }
  }
};

template <class N, Width kWidth, bool kBent>
__global__ void __launch_bounds__(DqShape::kThreads, 1) dq_kernel(const __grid_constant__ DqCall call) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kTileRows = backward_shape(kWidth).rows();
  extern __shared__ __align__(1024) unsigned char memory[];
  const DqShared<kWidth> shared{shared_address(memory)};
  const int unit = static_cast<int>(blockIdx.y), head = unit << call.rows.log_heads;
  const int kv_head = call.heads.group > 0 ? head / call.heads.group : call.heads.list.kv_head[head];
  const DqItem item = dq_item(call, static_cast<int>(blockIdx.x));
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == 0) {
    give_registers<DqShape::kFetchRegisters>();
    if (threadIdx.x < 32) fetch_dq<kWidth>(call, shared, item, head, kv_head);
  } else {
    take_registers<DqShape::kMathRegisters>();
    DqMath<N, kWidth, kBent> math(call, shared, group - 1);
    float lse[2], delta[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int place = math.place(i);
      const bool inside = item.begin + (place >> call.rows.log_heads) < item.end;
      const Index tile = static_cast<Index>(unit) * call.rows.tiles + item.tile + place / kTileRows;
      const float* from = call.statistics + tile * (2 * kTileRows) + statistics_at(place % kTileRows);
      lse[i] = inside ? from[0] : -kMinusInfinity<float>;
      delta[i] = inside ? from[kTileRows] : 0.0f;
    }
    if (item.first < item.last) math.run(lse, delta);
    math.store(item, head, lse);
  }
#else
  __trap();  // compiled for another GPU: the registry does not come here
#endif
}

template <class N, Width kWidth, bool kBent>
void launch_dq(const DqCall& call, cudaStream_t stream) {
  constexpr DqShape kShape = dq_shape(kWidth);
  static_assert(kShape.shared_bytes() <= 227 * 1024);
  launch(&dq_kernel<N, kWidth, kBent>,
         {dim3(static_cast<unsigned>(call.active), static_cast<unsigned>(call.heads_q >> call.rows.log_heads)),
          dim3(DqShape::kThreads), static_cast<std::size_t>(kShape.shared_bytes())},
         stream, call);
}

template <class N>
void launch_any(Width width, const DqCall& call, cudaStream_t stream) {
  const bool bent = call.scores.bend != 0;
  switch (width) {
    case Width::w64:
      return launch_dq<N, Width::w64, false>(call, stream);
    case Width::w128:
      return bent ? launch_dq<N, Width::w128, true>(call, stream) : launch_dq<N, Width::w128, false>(call, stream);
    case Width::w192_128:
      return bent ? launch_dq<N, Width::w192_128, true>(call, stream)
                  : launch_dq<N, Width::w192_128, false>(call, stream);
    default:
      return bent ? launch_dq<N, Width::w256, true>(call, stream) : launch_dq<N, Width::w256, false>(call, stream);
  }
}

}  // namespace weft::cuda::sm90
