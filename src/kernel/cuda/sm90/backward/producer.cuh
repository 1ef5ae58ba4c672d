// The backward's shared memory, and the producer warpgroup that fills it: one warp iterates over steps, loads by TMA
// and zero-fills; with Dq::ordered one thread per consumer adds dQ.
#pragma once

#include "kernel/cuda/rows.cuh"
#include "kernel/cuda/sm90/backward/query_steps.cuh"
#include "kernel/cuda/sm90/fragments.cuh"
#include "kernel/cuda/sm90/ptx/ptx.cuh"

namespace weft::cuda::sm90 {

template <Width kWidth, Dq kDq>
struct BackwardSharedMemory {
  static constexpr BackwardShape kShape = backward_shape(kWidth, kDq);
  static constexpr int kStages = kShape.stages, kDsBuffers = kShape.ds_buffers(), kConsumers = kShape.consumers;
  static constexpr int kKeyBuffers = kShape.key_buffers;
  static constexpr unsigned kVAt = kKeyBuffers * kShape.k_bytes(), kQAt = kVAt + kKeyBuffers * kShape.v_bytes(),
                            kDoutAt = kQAt + kStages * kShape.q_bytes(),
                            kDsAt = kDoutAt + kStages * kShape.dout_bytes(),
                            kPAt = kDsAt + kDsBuffers * kShape.ds_bytes(),
                            kLseAt = kPAt + kShape.p_buffers * kShape.ds_bytes(),
                            kDeltaAt = kLseAt + kStages * kShape.statistics_bytes(),
                            kStepAt = kDeltaAt + kStages * kShape.statistics_bytes(),
                            kItemAt = kStepAt + kStages * BackwardShape::kStepBytes,
                            kBarrierAt = kItemAt + kKeyBuffers * BackwardShape::kItemBytes,
                            kTilesAt = kShape.shared_bytes() - 8;
  static constexpr int kParts = kShape.parts();
  static constexpr int kSteps = kConsumers == 3 ? 3 : 1;  // steps from one whose dQ a consumer computes to the next
  static constexpr unsigned kPartsAt = kShape.parts_at(),
                            kVisitAt = kPartsAt + kConsumers * kParts * BackwardShape::kPartBytes,
                            kPartBarrierAt = kVisitAt + 8 * BackwardShape::kVisits;
  unsigned base;

  __device__ static unsigned times(int n, int bytes) { return static_cast<unsigned>(n * bytes); }
  __device__ unsigned k(int b = 0) const { return base + times(b, kShape.k_bytes()); }
  __device__ unsigned v(int b = 0) const { return base + kVAt + times(b, kShape.v_bytes()); }
  __device__ unsigned q(int s) const { return base + kQAt + times(s, kShape.q_bytes()); }
  __device__ unsigned dout(int s) const { return base + kDoutAt + times(s, kShape.dout_bytes()); }
  __device__ unsigned ds(int b) const { return base + kDsAt + times(b, kShape.ds_bytes()); }
  __device__ unsigned p(int b) const { return base + kPAt + times(b, kShape.ds_bytes()); }
  __device__ unsigned lse(int s) const { return base + kLseAt + times(s, kShape.statistics_bytes()); }
  __device__ unsigned delta(int s) const { return base + kDeltaAt + times(s, kShape.statistics_bytes()); }
  __device__ unsigned step(int s) const { return base + kStepAt + times(s, BackwardShape::kStepBytes); }
  __device__ unsigned item(int b = 0) const { return base + kItemAt + times(b, BackwardShape::kItemBytes); }
  // The number of tiles of keys that have slices: the producer has few registers, and reads it again and again.
  __device__ unsigned tiles() const { return base + kTilesAt; }
  // mbarriers. full: the tile has landed. free: all readers are done. raw: it has landed, but must be zero-filled
  // before it is full.
  __device__ unsigned barrier(int n) const { return base + kBarrierAt + times(n, 8); }
  __device__ unsigned keys_full(int b = 0) const { return barrier(b); }
  __device__ unsigned keys_raw(int b = 0) const { return barrier(kKeyBuffers + b); }
  __device__ unsigned keys_free(int b = 0) const { return barrier(2 * kKeyBuffers + b); }
  __device__ unsigned q_full(int s) const { return barrier(3 * kKeyBuffers + s); }
  __device__ unsigned q_raw(int s) const { return q_full(kStages + s); }
  __device__ unsigned q_free(int s) const { return q_full(2 * kStages + s); }
  __device__ unsigned dout_full(int s) const { return q_full(3 * kStages + s); }
  __device__ unsigned dout_raw(int s) const { return q_full(4 * kStages + s); }
  __device__ unsigned dout_free(int s) const { return q_full(5 * kStages + s); }
  __device__ unsigned ds_free(int b) const { return q_full(6 * kStages + b); }
  // Of three_warpgroups.cuh and half_tiles.cuh alone.
  __device__ unsigned ds_full(int b) const { return ds_free(kDsBuffers + b); }

  // Dq::ordered: a part of dQ of a consumer, and the tile of dQ and order number of a step.
  __device__ unsigned part(int warpgroup, int b) const {
    return base + kPartsAt + times(warpgroup * kParts + b, BackwardShape::kPartBytes);
  }
  __device__ unsigned visit(int n) const { return base + kVisitAt + times(n % BackwardShape::kVisits, 8); }
  __device__ unsigned part_full(int warpgroup, int b) const {
    return base + kPartBarrierAt + times(warpgroup * kParts + b, 8);
  }
  __device__ unsigned part_free(int warpgroup, int b) const { return part_full(warpgroup + kConsumers, b); }

  __device__ void init() const {
    constexpr int kArrivalsPerWarpgroup = 4 * kArrivalsPerWarp,
                  kArrivals = kConsumers * kArrivalsPerWarpgroup;  // consumer warps
    for (int b = 0; b < kKeyBuffers; ++b) {
      mbarrier_init(keys_full(b), 1);
      mbarrier_init(keys_raw(b), 1);
      mbarrier_init(keys_free(b), kArrivals);
    }
    for (int s = 0; s < kStages; ++s) {
      for (const unsigned b : {q_full(s), q_raw(s), dout_full(s), dout_raw(s)}) mbarrier_init(b, 1);
      mbarrier_init(q_free(s), kArrivals);
      mbarrier_init(dout_free(s), kArrivals);
    }
    for (int b = 0; b < kDsBuffers; ++b) {
      mbarrier_init(ds_free(b), kConsumers == 3 ? kArrivalsPerWarpgroup : kArrivals);
      mbarrier_init(ds_full(b), kArrivals);
    }
    if constexpr (kDq == Dq::ordered)
      for (int p = 0; p < kConsumers * kParts; ++p) {
        mbarrier_init(part_full(0, p), kArrivalsPerWarpgroup);
        mbarrier_init(part_free(0, p), 1);
      }
    fence_mbarrier_init();
  }
};

__device__ inline void write_step(unsigned at, const QueryStep& s) {
  st_shared_v4_s32(at, s.flags, s.rows, s.keys, s.band);
  asm volatile("st.shared.s32 [%0], %1;\n" ::"r"(at + 16), "r"(s.sums) : "memory");
}
__device__ inline int read_sums(unsigned at) { return ld_shared_s32(at + 16); }
__device__ inline QueryStep read_query_step(unsigned at) {
  QueryStep s;
  asm volatile("ld.shared.v4.s32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(s.flags), "=r"(s.rows), "=r"(s.keys), "=r"(s.band)
               : "r"(at));
  asm volatile("ld.shared.s32 %0, [%1];\n" : "=r"(s.sums) : "r"(at + 16));
  return s;
}

// One warp zero-fills rows of a tile: 16 bytes per lane, four rows at a time.
template <int kRows, int kColumns, class Dead>
__device__ void zero_fill_rows(unsigned tile, const Dead& outside) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int r = lane / 8; r < kRows; r += 4)
    if (outside(r))
      for (int box = 0; box < kColumns / 64; ++box)
        st_shared_v4_s32(tile + static_cast<unsigned>((box * kRows + r) * 128 + lane % 8 * 16), 0, 0, 0, 0);
}

template <int kColumns>
__device__ void tma_load_tile(unsigned to, const CUtensorMap& map, unsigned barrier, int rows, int head, int row) {
  for (int box = 0; box < kColumns / 64; ++box)
    tma_load_3d(to + static_cast<unsigned>(box * rows * 128), map, barrier, 64 * box, head, row);
}

// What consumers need to know of an item.
struct SharedItem {
  enum Flag : int {
    kUsed = 1,     // a query head uses the keys
    kZeroFill = 2  // some keys are in no slice
  };
  int begin, end, kv_head, flags;  // begin < 0: there is no more work
  int first, last;

  __device__ static SharedItem read(unsigned at) {
    SharedItem i;
    asm volatile("ld.shared.v4.s32 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(i.begin), "=r"(i.end), "=r"(i.kv_head), "=r"(i.flags)
                 : "r"(at));
    asm volatile("ld.shared.v2.s32 {%0,%1}, [%2];\n" : "=r"(i.first), "=r"(i.last) : "r"(at + 16));
    return i;
  }
};

// K and V of an item. Keys in no slice are zero-filled, because P = 0 times NaN is NaN.
template <Width kWidth, Dq kDq>
__device__ void load_k_v(const BackwardParams& params, const BackwardSharedMemory<kWidth, kDq>& shared,
                         const KeyItem<backward_shape(kWidth).keys>& item, int kv_head, int buffer,
                         unsigned& raw_phases) {
  constexpr BackwardShape kShape = backward_shape(kWidth);
  constexpr int kKeys = kShape.keys;
  const int lane = static_cast<int>(threadIdx.x % 32);
  bool covers = false;  // one slice covers all keys; past the buffer's last key TMA has filled in zeros
  for (int m = item.first + lane; m < item.last; m += 32) {
    const WorkSlice& s = params.keys.slices[m];
    covers = covers || (s.k_begin <= item.begin && s.k_end >= item.end);
  }
  const bool used = item.has_work();
  const bool shown = __any_sync(0xffffffffu, covers);
  const bool zero_fill = used && (!shown || (item.end - item.begin < kKeys && item.end < params.k_rows));
  const unsigned barrier = zero_fill ? shared.keys_raw(buffer) : shared.keys_full(buffer);
  if (lane == 0) {
    st_shared_v4_s32(shared.item(buffer), item.begin, item.end, kv_head,
                     (used ? SharedItem::kUsed : 0) | (shown ? 0 : SharedItem::kZeroFill));
    st_shared_v4_s32(shared.item(buffer) + 16, item.first, item.last, 0, 0);
    if (used) {
      mbarrier_arrive_expect_tx(barrier, kShape.k_bytes() + kShape.v_bytes());
      tma_load_tile<kShape.dim_qk>(shared.k(buffer), params.k, barrier, kKeys, kv_head, item.begin);
      tma_load_tile<kShape.dim_v>(shared.v(buffer), params.v, barrier, kKeys, kv_head, item.begin);
    } else {
      mbarrier_arrive(barrier);
    }
  }
  __syncwarp();
  if (!zero_fill) return;
  mbarrier_wait(barrier, raw_phases >> buffer & 1);
  raw_phases ^= 1u << buffer;
  const auto outside = [&](int r) { return item.begin + r >= item.end || !item.is_live(params, item.begin + r); };
  zero_fill_rows<kKeys, kShape.dim_qk>(shared.k(buffer), outside);
  zero_fill_rows<kKeys, kShape.dim_v>(shared.v(buffer), outside);
  fence_proxy_async_shared();
  __syncwarp();
  if (lane == 0) mbarrier_arrive(shared.keys_full(buffer));
}

// What persists from item to item: the pipeline of Q and dO.
template <int kStages>
struct ProducerState {
  PipelineState<kStages> pipeline;
  int steps = 0;
  unsigned raw_phases = 0;  // one bit per stage
  __device__ int stage() const { return pipeline.index; }
  __device__ unsigned phase() const { return pipeline.phase; }
  __device__ void next() {
    pipeline.advance();
    ++steps;
  }
};
// Two stages fit into one register, of which a producer has few.
template <>
struct ProducerState<2> {
  int steps = 0;
  unsigned raw_phases = 0;
  __device__ int stage() const { return steps & 1; }
  __device__ unsigned phase() const { return static_cast<unsigned>(steps) >> 1 & 1; }
  __device__ void next() { ++steps; }
};

// Q and dO of an item.
template <Width kWidth, Dq kDq>
__device__ void load_q_dout(const BackwardParams& params, const BackwardSharedMemory<kWidth, kDq>& shared,
                            const KeyItem<backward_shape(kWidth).keys>& item,
                            ProducerState<backward_shape(kWidth, kDq).stages>& state) {
  constexpr BackwardShape kShape = backward_shape(kWidth);
  const int lane = static_cast<int>(threadIdx.x % 32);
  constexpr bool kIdles = kShape.consumers == 2 && !has_one_slot(kWidth, kDq);
  QueryStepIterator<kShape.keys, kDq == Dq::ordered> iterator(params, item);
  for (bool more = iterator.start(); more;) {
    QueryStep step = iterator.step();
    const int row = iterator.row(), head = iterator.head();
    // The entry of eight steps before has been read: a stage is freed two or three steps late; by then dQ of the step
    // before, or of the one before that, is in shared memory, and of each consumer all parts but the last have been
    // added.
    if constexpr (kDq == Dq::ordered)
      if (lane == 0) st_shared_v2_s32(shared.visit(state.steps), step.sums, iterator.dq_order());
    more = iterator.next();
    step.flags |= !more ? QueryStep::kLast : kIdles ? iterator.idle() * QueryStep::kNextIdle : 0;
    const int stage = state.stage();
    const bool zero_fill = (step.flags & QueryStep::kZeroFill) != 0;
    const float* statistics = params.statistics + static_cast<Index>(step.sums) * (2 * kShape.rows());
    const unsigned q_ready = zero_fill ? shared.q_raw(stage) : shared.q_full(stage);
    const unsigned dout_ready = zero_fill ? shared.dout_raw(stage) : shared.dout_full(stage);
    mbarrier_wait(shared.q_free(stage), state.phase() ^ 1);
    if (lane == 0) {
      write_step(shared.step(stage), step);
      mbarrier_arrive_expect_tx(q_ready, kShape.q_bytes() + kShape.statistics_bytes());
      tma_load_tile<kShape.dim_qk>(shared.q(stage), params.q, q_ready, kShape.rows(), head, row);
      cp_async_bulk(shared.lse(stage), statistics, kShape.statistics_bytes(), q_ready);
    }
    __syncwarp();
    mbarrier_wait(shared.dout_free(stage), state.phase() ^ 1);
    if (lane == 0) {
      mbarrier_arrive_expect_tx(dout_ready, kShape.dout_bytes() + kShape.statistics_bytes());
      tma_load_tile<kShape.dim_v>(shared.dout(stage), params.dout, dout_ready, kShape.rows(), head, row);
      cp_async_bulk(shared.delta(stage), statistics + kShape.rows(), kShape.statistics_bytes(), dout_ready);
    }
    __syncwarp();
    if (zero_fill) {
      const unsigned parity = state.raw_phases >> stage & 1;
      state.raw_phases ^= 1u << stage;
      const int begin = QueryStep::low(step.rows) << params.rows.log2_heads, end = QueryStep::high(step.rows)
                                                                                   << params.rows.log2_heads;
      const auto outside = [&](int r) { return r < begin || r >= end; };
      mbarrier_wait(q_ready, parity);
      zero_fill_rows<kShape.rows(), kShape.dim_qk>(shared.q(stage), outside);
      mbarrier_wait(dout_ready, parity);
      zero_fill_rows<kShape.rows(), kShape.dim_v>(shared.dout(stage), outside);
      fence_proxy_async_shared();
      __syncwarp();
      if (lane == 0) {
        mbarrier_arrive(shared.q_full(stage));
        mbarrier_arrive(shared.dout_full(stage));
      }
    }
    state.next();
  }
}

// The warp that claims items, iterates over steps and loads. With Dq::ordered a block waits for items before its own,
// so its first item too is claimed from the counter: a block with a lower index may not have started.
template <Width kWidth, Dq kDq>
__device__ void produce(const BackwardParams& params, const BackwardSharedMemory<kWidth, kDq>& shared) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto all_tiles = [&] { return ld_shared_s32(shared.tiles()); };
  ProducerState<backward_shape(kWidth, kDq).stages> state;
  PipelineState<shared.kKeyBuffers> keys;
  unsigned raw_phases = 0;  // one bit per buffer of keys
  const auto claim = [&] {
    const int given =
        kDq == Dq::ordered ? 0 : static_cast<int>(gridDim.x);  // items that blocks have without claiming them
    int claimed = 0;
    if (lane == 0) {
      claimed = atomicAdd(params.counter, 1);
      if (claimed - all_tiles() * params.heads_k == static_cast<int>(gridDim.x) - given - 1)
        *params.counter = 0;  // the last claim resets the counter for the next launch
      claimed += given;
    }
    return __shfl_sync(0xffffffffu, claimed, 0);
  };
  // Until the previous kernel is done the counter belongs to another call.
  if (kDq == Dq::ordered && !params.keys_ready) griddepcontrol_wait();
  for (int next = kDq == Dq::ordered ? claim() : static_cast<int>(blockIdx.x); next < all_tiles() * params.heads_k;) {
    const int at = params.keys.order != nullptr ? params.keys.order[next] : next, tiles = all_tiles();
    const int kv_head = at / tiles, tile = at % tiles;
    const KeyItem<backward_shape(kWidth).keys> item(params, tile, kv_head);
    if (!params.keys_ready) griddepcontrol_wait();  // work lists are complete before any programmatic launch
    mbarrier_wait(shared.keys_free(keys.index), keys.phase ^ 1);
    load_k_v<kWidth, kDq>(params, shared, item, kv_head, keys.index, raw_phases);
    keys.advance();
    if (params.keys_ready) griddepcontrol_wait();  // statistics and dQ's sums come from the previous kernel
    load_q_dout<kWidth, kDq>(params, shared, item, state);
    // Claimed only now, so that the work is not held back from blocks that are idle. The last steps are still being
    // computed.
    next = claim();
  }
  mbarrier_wait(shared.keys_free(keys.index), keys.phase ^ 1);
  if (lane == 0) {
    st_shared_v4_s32(shared.item(keys.index), -1, 0, 0, 0);
    if constexpr (kDq == Dq::ordered)
      for (int n = 0; n < shared.kSteps; ++n) st_shared_v2_s32(shared.visit(state.steps + n), -1, 0);
    mbarrier_arrive(shared.keys_full(keys.index));
  }
}

// --- Zeros in dK and dV of keys in no slice, written by the idle producer warps while the consumers compute ---

// Threads 32 .. 127 of a block, 16 per row. Nothing is unrolled, because they have few registers.
__device__ inline void zero_fill_keys(const TensorView& to, int element_bytes, int2 keys, int head) {
  constexpr int kFirst = 32, kLanes = 16, kRows = (128 - kFirst) / kLanes;
  const int thread = static_cast<int>(threadIdx.x) - kFirst, lane = thread % kLanes;
  const int bytes = static_cast<int>(to.dim) * element_bytes;
#pragma unroll 1
  for (int key = keys.x + thread / kLanes; key < keys.y; key += kRows) {
    char* row = static_cast<char*>(to.data) + offset_of(to, key, head) * element_bytes;
    if ((reinterpret_cast<std::uintptr_t>(row) | static_cast<unsigned>(bytes)) % 16 == 0) {
#pragma unroll 1
      for (int i = 16 * lane; i < bytes; i += 16 * kLanes) *reinterpret_cast<uint4*>(row + i) = {0, 0, 0, 0};
    } else {  // floats: others are 16 bytes
#pragma unroll 1
      for (int i = 4 * lane; i < bytes; i += 4 * kLanes) *reinterpret_cast<float*>(row + i) = 0;
    }
  }
}

__device__ inline void zero_fill_unseen(const BackwardParams& params) {
#pragma unroll 1
  for (int n = static_cast<int>(blockIdx.x); n < params.unseen_tiles * params.heads_k;
       n += static_cast<int>(gridDim.x)) {
    const int tile = n / params.heads_k, head = n % params.heads_k;
    const int2 keys = params.unseen[tile];
    if (keys.y == 0) return;  // there are no more
    zero_fill_keys(params.dk, params.vec8_dk ? 2 : 4, keys, head);
    zero_fill_keys(params.dv, params.vec8_dv ? 2 : 4, keys, head);
  }
}

// The thread that adds a consumer's parts of dQ, each when its order number comes.
template <Width kWidth>
__device__ void add_dq_in_order(const BackwardParams& params, const BackwardSharedMemory<kWidth, Dq::ordered>& shared,
                                int warpgroup) {
  constexpr BackwardShape kShape = backward_shape(kWidth, Dq::ordered);
  constexpr int kPart = BackwardShape::kPartBytes / 4, kOfTile = kShape.parts_of_tile();
  PipelineState<kShape.parts()> part;
  for (int n = kOfTile == 1 ? warpgroup : 0;; n += shared.kSteps) {
    mbarrier_wait(shared.part_full(warpgroup, part.index), part.phase);
    const int2 visit = ld_shared_v2_s32(shared.visit(n));
    if (visit.x < 0) return;  // there is no more work
    const Index to = kOfTile * static_cast<Index>(visit.x) + (kOfTile == 1 ? 0 : warpgroup);
    fence_proxy_async_shared();  // for the consumers' stores to the part
    wait_until_equal_acquire(params.additions + to, visit.y);
    cp_reduce_async_bulk_add_f32(params.dq_sums + to * kPart, shared.part(warpgroup, part.index),
                                 BackwardShape::kPartBytes);
    cp_async_bulk_wait_group_read();
    mbarrier_arrive(shared.part_free(warpgroup, part.index));
    cp_async_bulk_wait_group();
    store_release(params.additions + to, visit.y + 1);
    part.advance();
  }
}

// Called by all threads at the start of a block.
template <Width kWidth, Dq kDq>
__device__ __forceinline__ BackwardSharedMemory<kWidth, kDq> begin_block(const BackwardParams& params,
                                                                         const unsigned char* memory) {
  const BackwardSharedMemory<kWidth, kDq> shared{warp_uniform(shared_address(memory))};
  if (threadIdx.x == 0) {
    shared.init();
    // Like all lists it is complete before any programmatic launch.
    st_shared_s32(shared.tiles(), params.keys.count != nullptr ? *params.keys.count : params.keys.active);
  }
  __syncthreads();
  griddepcontrol_launch_dependents();
  return shared;
}
// The producer warpgroup.
template <Width kWidth, Dq kDq>
__device__ __forceinline__ void run_producer(const BackwardParams& params,
                                             const BackwardSharedMemory<kWidth, kDq>& shared, int warp) {
  setmaxnreg_dec<backward_shape(kWidth).producer_registers()>();
  if (warp == 0) {
    produce<kWidth, kDq>(params, shared);
  } else {
    griddepcontrol_wait();  // in every block, so that the next kernel cannot overtake the previous one
    zero_fill_unseen(params);
    if constexpr (kDq == Dq::ordered)
      if (warp <= shared.kConsumers && threadIdx.x % 32 == 0) add_dq_in_order<kWidth>(params, shared, warp - 1);
  }
}

}  // namespace weft::cuda::sm90
