// dQ by the owner of its rows: iterates over keys as the forward does, with two more matrix products. A block has 128
// rows times heads, a consumer 64 of them: S = Q·K^T and dP = dO·V^T are its accumulators, and dS stays in registers as
// the A operand of dQ += dS·K.
#pragma once

#include "cuda/launch.h"
#include "kernel/cuda/sm90/backward/producer.cuh"
#include "kernel/cuda/sm90/fragments.cuh"
#include "kernel/cuda/sm90/ptx/wgmma.cuh"

namespace weft::cuda::sm90 {

template <Width kWidth>
struct DqSharedMemory {
  static constexpr DqShape kShape = dq_shape(kWidth);
  static constexpr int kStages = kShape.stages;
  static constexpr unsigned kDoutAt = kShape.q_bytes(), kKAt = kDoutAt + kShape.dout_bytes(),
                            kVAt = kKAt + kStages * kShape.k_bytes(), kStepAt = kVAt + kStages * kShape.v_bytes(),
                            kBarrierAt = kStepAt + kStages * DqShape::kStepBytes;
  unsigned base;

  __device__ static unsigned times(int n, int bytes) { return static_cast<unsigned>(n * bytes); }
  __device__ unsigned q(int warpgroup) const { return base + times(warpgroup, kShape.q_bytes() / 2); }
  __device__ unsigned dout(int warpgroup) const { return base + kDoutAt + times(warpgroup, kShape.dout_bytes() / 2); }
  __device__ unsigned k(int s) const { return base + kKAt + times(s, kShape.k_bytes()); }
  __device__ unsigned v(int s) const { return base + kVAt + times(s, kShape.v_bytes()); }
  __device__ unsigned step(int s) const { return base + kStepAt + times(s, DqShape::kStepBytes); }
  __device__ unsigned barrier(int n) const { return base + kBarrierAt + times(n, 8); }
  __device__ unsigned rows_full() const { return barrier(0); }
  __device__ unsigned keys_full(int s) const { return barrier(1 + s); }
  __device__ unsigned keys_raw(int s) const { return barrier(1 + kStages + s); }
  __device__ unsigned keys_free(int s) const { return barrier(1 + 2 * kStages + s); }
  __device__ void init() const {
    mbarrier_init(rows_full(), 1);
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(keys_full(s), 1);
      mbarrier_init(keys_raw(s), 1);
      mbarrier_init(keys_free(s), 8 * kArrivalsPerWarp);
    }
    fence_mbarrier_init();
  }
};

// Iterates over the tiles of keys that an item's rows see, slice by slice. Tiles are counted from the slice's k_first,
// so a row's bits do not depend on where its tile begins.
template <int kKeys>
class DqKeyIterator {
 public:
  __device__ DqKeyIterator(const DqParams& params, const DqItem& item)
      : slices_(params.slices), item_(item), member_(item.first) {}
  __device__ bool start() { return enter(); }
  __device__ bool next() {
    key_ += kKeys;
    if (key_ < stop_) return true;
    ++member_;
    return enter();
  }
  __device__ int key() const { return key_; }
  __device__ QueryStep step(int k_rows) const {
    constexpr int kFar = 0x3fff;
    const WorkSlice& s = slice_;
    const int row = item_.begin, rows = item_.end - row;
    const bool all = row >= s.q_begin && row + rows <= s.q_end && key_ >= s.k_begin && key_ + kKeys <= s.k_end &&
                     key_ - (row + rows - 1) >= s.lo && key_ + kKeys - 1 - row <= s.hi;
    const bool zero_fill = key_ < s.k_begin || (key_ + kKeys > s.k_end && s.k_end < k_rows);
    const long long shift = static_cast<long long>(row) - key_;
    const auto near = [](long long x) { return static_cast<int>(x < -kFar ? -kFar : x > kFar ? kFar : x); };
    return {(all ? 0 : QueryStep::kMasked) | (zero_fill ? QueryStep::kZeroFill : 0),
            QueryStep::pair(max(0, s.q_begin - row), min(rows, s.q_end - row)),
            QueryStep::pair(max(0, s.k_begin - key_), min(kKeys, s.k_end - key_)),
            QueryStep::pair(near(s.lo + shift), near(s.hi + shift)), 0};
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

// The producer warp.
template <Width kWidth>
__device__ void produce_dq(const DqParams& params, const DqSharedMemory<kWidth>& shared, const DqItem& item, int head,
                           int kv_head) {
  constexpr DqShape kShape = dq_shape(kWidth);
  constexpr int kTileRows = backward_shape(kWidth).rows(), kKeys = kShape.keys;
  const int lane = static_cast<int>(threadIdx.x % 32);
  PipelineState<kShape.stages> stage;
  unsigned raw_phases = 0;  // one bit per stage
  DqKeyIterator<kKeys> iterator(params, item);
  bool more = iterator.start();
  if (more && lane == 0) {
    const int tiles = item.end - item.begin > params.rows.size() ? dq_tiles_per_item(kWidth) : 1;
    mbarrier_arrive_expect_tx(shared.rows_full(),
                              static_cast<unsigned>(tiles * 2 * kTileRows * (kShape.dim_qk + kShape.dim_v)));
    for (int t = 0; t < tiles; ++t) {
      const int row = item.begin + (t << params.rows.log2_size);
      tma_load_tile<kShape.dim_qk>(shared.q(t), params.q, shared.rows_full(), kTileRows, head, row);
      tma_load_tile<kShape.dim_v>(shared.dout(t), params.dout, shared.rows_full(), kTileRows, head, row);
    }
  }
  __syncwarp();
  while (more) {
    QueryStep step = iterator.step(params.k_rows);
    const int key = iterator.key();
    more = iterator.next();
    if (!more) step.flags |= QueryStep::kLast;
    const bool zero_fill = (step.flags & QueryStep::kZeroFill) != 0;
    const unsigned ready = zero_fill ? shared.keys_raw(stage.index) : shared.keys_full(stage.index);
    mbarrier_wait(shared.keys_free(stage.index), stage.phase ^ 1);
    if (lane == 0) {
      st_shared_v4_s32(shared.step(stage.index), step.flags, step.rows, step.keys, step.band);
      mbarrier_arrive_expect_tx(ready, kShape.k_bytes() + kShape.v_bytes());
      tma_load_tile<kShape.dim_qk>(shared.k(stage.index), params.k, ready, kKeys, kv_head, key);
      tma_load_tile<kShape.dim_v>(shared.v(stage.index), params.v, ready, kKeys, kv_head, key);
    }
    __syncwarp();
    if (zero_fill) {
      mbarrier_wait(ready, raw_phases >> stage.index & 1);
      raw_phases ^= 1u << stage.index;
      const int begin = QueryStep::low(step.keys), end = QueryStep::high(step.keys);
      const auto outside = [&](int r) { return r < begin || r >= end; };
      zero_fill_rows<kKeys, kShape.dim_qk>(shared.k(stage.index), outside);
      zero_fill_rows<kKeys, kShape.dim_v>(shared.v(stage.index), outside);
      fence_proxy_async_shared();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared.keys_full(stage.index));
    }
    stage.advance();
  }
}

template <class N, Width kWidth, bool kSoftcap>
struct DqConsumer {
  static constexpr DqShape kShape = dq_shape(kWidth);
  static constexpr bool kBf16 = std::is_same_v<N, Bf16>;
  static constexpr int kDimQk = kShape.dim_qk, kDimV = kShape.dim_v, kKeys = kShape.keys;
  // Rows of a TMA box: a query tile of the backward, which may hold the rows of both consumers.
  static constexpr int kBoxRows = backward_shape(kWidth).rows();

  const DqParams& params;
  const DqSharedMemory<kWidth> shared;
  const int warpgroup;
  float sums[kDimQk / 2];

  __device__ __forceinline__ DqConsumer(const DqParams& c, const DqSharedMemory<kWidth>& sh, int g)
      : params(c), shared(sh), warpgroup(g) {
#pragma unroll
    for (int i = 0; i < kDimQk / 2; ++i) sums[i] = 0;
  }
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ __forceinline__ int place(int i) const {  // the lane's two rows times heads
    return warpgroup * 64 + static_cast<int>(threadIdx.x % 128) / 32 * 16 + lane() / 4 + 8 * i;
  }

  template <int kColumns>
  __device__ __forceinline__ void mma_keys_rows(float (&to)[kKeys / 2], unsigned rows, unsigned keys) const {
    const unsigned a = smem_descriptor(rows), b = smem_descriptor(keys);
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i)
      wgmma<kBf16>(to, advance_descriptor(a, static_cast<unsigned>(i / 4 * kBoxRows * 128 + i % 4 * 32)),
                   advance_descriptor(b, static_cast<unsigned>(i / 4 * kKeys * 128 + i % 4 * 32)), i > 0);
    wgmma_commit_group();
  }
  __device__ __forceinline__ void add_keys(const unsigned (&ds)[kKeys / 4], unsigned keys) {
    const unsigned b = smem_descriptor<kKeys * 128>(keys);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      const unsigned a[4] = {ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]};
      wgmma<kBf16>(sums, a, advance_descriptor(b, static_cast<unsigned>(i * 2048)), true);
    }
    wgmma_commit_group();
  }
  // Scores become the factors of dP - delta.
  __device__ __forceinline__ void compute_p_ds(float (&s)[kKeys / 2], const float (&lse)[2], unsigned at) const {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      float slope = 1;
      if constexpr (kSoftcap) s[i] = softcap_tanh(s[i] * params.scores.softcap_scale, slope);
      s[i] = exp2_fast(fmaf(s[i], params.scores.scale_log2, -lse[i / 2 % 2]));
      if constexpr (kSoftcap) s[i] *= slope;
    }
    if ((ld_shared_s32(at) & QueryStep::kMasked) == 0) return;
    int flags, rows, keys, band;
    asm volatile("ld.shared.v4.s32 {%0,%1,%2,%3}, [%4];\n" : "=r"(flags), "=r"(rows), "=r"(keys), "=r"(band) : "r"(at));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = place(i) >> params.rows.log2_heads;
      const bool inside = row >= QueryStep::low(rows) && row < QueryStep::high(rows);
      const int first = max(QueryStep::low(keys), QueryStep::low(band) + row);
      const int last = inside ? min(QueryStep::high(keys) - 1, QueryStep::high(band) + row) : first - 1;
      const unsigned count = static_cast<unsigned>(max(0, last - first + 1));
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (static_cast<unsigned>(8 * n + 2 * (lane() % 4) + j - first) >= count) s[4 * n + 2 * i + j] = 0;
    }
  }
  __device__ __forceinline__ void wait_for_slot() const { bar_sync(1 + warpgroup, 256); }
  __device__ __forceinline__ void pass_slot() const { bar_arrive(2 - warpgroup, 256); }

  __device__ __forceinline__ void run(const float (&lse)[2], const float (&delta)[2]) {
    if (warpgroup == 1) bar_arrive(1, 256);  // opens the slot of the first consumer
    PipelineState<kShape.stages> stage;
    bool last;
    mbarrier_wait(shared.rows_full(), 0);
    do {
      float s[kKeys / 2], dp[kKeys / 2];
      unsigned ds[kKeys / 4];
      // Warp-uniform, so that descriptors are computed in the uniform datapath.
      const int at = kShape.stages == 1 ? 0 : static_cast<int>(warp_uniform(static_cast<unsigned>(stage.index)));
      mbarrier_wait(shared.keys_full(at), stage.phase);
      wait_for_slot();
      wgmma_fence();
      mma_keys_rows<kDimQk>(s, shared.q(warpgroup), shared.k(at));
      mma_keys_rows<kDimV>(dp, shared.dout(warpgroup), shared.v(at));
      pass_slot();
      wgmma_wait_group<1>();
      warpgroup_fence_operand(s);
      compute_p_ds(s, lse, shared.step(at));
      last = (ld_shared_s32(shared.step(at)) & QueryStep::kLast) != 0;
      wgmma_wait_group<0>();
      warpgroup_fence_operand(dp);
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i)
        ds[i] = packed_pair<N>(s[2 * i] * fmaf(dp[2 * i], params.scale, -delta[i % 2]),
                               s[2 * i + 1] * fmaf(dp[2 * i + 1], params.scale, -delta[i % 2]));
      wait_for_slot();
      warpgroup_fence_operand(ds);
      wgmma_fence();
      add_keys(ds, shared.k(at));
      pass_slot();
      wgmma_wait_group<0>();
      if (lane_arrives()) mbarrier_arrive(shared.keys_free(at));
      stage.advance();
    } while (!last);
    warpgroup_fence_operand(sums);
  }

  __device__ __forceinline__ void store(const DqItem& item, int head, const float (&lse)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = item.begin + (place(i) >> params.rows.log2_heads);
      const int own = head + (place(i) & (params.rows.heads() - 1));
      const bool inside = row < item.end, seeing = !isinf(lse[i]);
      const auto value = [&](int n, int j) { return seeing ? sums[4 * n + 2 * i + j] : 0.0f; };
      if (!params.vec8) {
        if (!inside) continue;
        const RowOut to(params.dq, row, own);
#pragma unroll
        for (int n = 0; n < kDimQk / 8; ++n) to.store(8 * n + 2 * (lane() % 4), value(n, 0), value(n, 1));
        continue;
      }
      std::uint16_t* at = static_cast<std::uint16_t*>(params.dq.data) + (inside ? offset_of(params.dq, row, own) : 0);
      store_row_vec8<N, kDimQk>(at, inside, 0, params.dq.dim, value);
    }
  }
};

template <class N, Width kWidth, bool kSoftcap>
__global__ void __launch_bounds__(DqShape::kThreads, 1) dq_kernel(const __grid_constant__ DqParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kTileRows = backward_shape(kWidth).rows();
  extern __shared__ __align__(1024) unsigned char memory[];
  const DqSharedMemory<kWidth> shared{shared_address(memory)};
  const int unit = static_cast<int>(blockIdx.y), head = unit << params.rows.log2_heads;
  const int kv_head = params.heads.group > 0 ? head / params.heads.group : params.heads.list.kv_head[head];
  if (static_cast<int>(blockIdx.x) >= count_at(params.count, params.active)) return;
  const DqItem item = params.items[blockIdx.x];
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    setmaxnreg_dec<DqShape::kProducerRegisters>();
    if (threadIdx.x < 32) produce_dq<kWidth>(params, shared, item, head, kv_head);
  } else {
    setmaxnreg_inc<DqShape::kConsumerRegisters>();
    DqConsumer<N, kWidth, kSoftcap> consumer(params, shared, warpgroup - 1);
    float lse[2], delta[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int place = consumer.place(i);
      const bool inside = item.begin + (place >> params.rows.log2_heads) < item.end;
      const Index tile = static_cast<Index>(unit) * params.rows.tiles + item.tile + place / kTileRows;
      const float* from = params.statistics + tile * (2 * kTileRows) + statistics_at(place % kTileRows);
      lse[i] = inside ? from[0] : -kMinusInfinity<float>;
      delta[i] = inside ? from[kTileRows] : 0.0f;
    }
    if (item.first < item.last) consumer.run(lse, delta);
    consumer.store(item, head, lse);
  }
#else
  __trap();  // compiled for another GPU; the registry never launches it there
#endif
}

template <class N, Width kWidth, bool kSoftcap>
void launch_dq(const DqParams& params, cudaStream_t stream) {
  constexpr DqShape kShape = dq_shape(kWidth);
  static_assert(kShape.shared_bytes() <= 227 * 1024);
  launch(&dq_kernel<N, kWidth, kSoftcap>,
         {dim3(static_cast<unsigned>(params.active), static_cast<unsigned>(params.heads_q >> params.rows.log2_heads)),
          dim3(DqShape::kThreads), static_cast<std::size_t>(kShape.shared_bytes())},
         stream, params);
}

template <class N>
void run_dq(Width width, const DqParams& params, cudaStream_t stream) {
  const bool softcap = params.scores.softcap_scale != 0;
  dispatch_width(width, [&]<Width kWidth>() {
    if constexpr (kWidth != Width::w64)
      if (softcap) return launch_dq<N, kWidth, true>(params, stream);
    launch_dq<N, kWidth, false>(params, stream);
  });
}

}  // namespace weft::cuda::sm90
