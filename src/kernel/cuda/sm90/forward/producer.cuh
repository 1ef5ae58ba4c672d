// The forward's shared memory, and the producer warpgroup that fills it: one thread claims tiles and loads Q and K, one
// loads V, one warp zero-fills V, and one writes rows that are in no slice.
#pragma once

#include "kernel/cuda/rows.cuh"
#include "kernel/cuda/sm90/forward/key_steps.cuh"
#include "kernel/cuda/sm90/forward/params.h"
#include "kernel/cuda/sm90/ptx/ptx.cuh"

namespace weft::cuda::sm90 {

template <Width kWidth>
struct SharedMemory {
  static constexpr ForwardShape kShape = forward_shape(kWidth);
  static constexpr unsigned kQBytes = kShape.q_bytes(), kKBytes = kShape.k_bytes(), kVBytes = kShape.v_bytes();
  static constexpr int kKStages = kShape.k_stages, kVStages = kShape.v_stages, kQStages = kShape.q_stages;
  unsigned base;

  __device__ unsigned q(int buffer) const { return base + static_cast<unsigned>(buffer) * kQBytes; }
  __device__ unsigned k(int stage) const { return base + kQStages * kQBytes + static_cast<unsigned>(stage) * kKBytes; }
  __device__ unsigned v(int stage) const {
    return base + kQStages * kQBytes + kKStages * kKBytes + static_cast<unsigned>(stage) * kVBytes;
  }
  __device__ unsigned step(int stage) const {
    return base + static_cast<unsigned>(kShape.tile_bytes()) + static_cast<unsigned>(stage) * ForwardShape::kStepBytes;
  }
  __device__ unsigned states(int buffer) const {  // saved states of the rows of q(buffer)
    return base + static_cast<unsigned>(kShape.tile_bytes()) + kKStages * ForwardShape::kStepBytes +
           static_cast<unsigned>(buffer * kShape.state_bytes());
  }
  __device__ unsigned barrier(int n) const { return states(kQStages) + static_cast<unsigned>(n) * 8; }
  // mbarriers. full: the tile has landed. free: all readers are done. raw: V has landed, but must be zero-filled before
  // it is full.
  __device__ unsigned k_full(int s) const { return barrier(s); }
  __device__ unsigned k_free(int s) const { return barrier(kKStages + s); }
  __device__ unsigned step_full(int s) const { return barrier(2 * kKStages + s); }  // the Step is written
  __device__ unsigned v_full(int s) const { return barrier(3 * kKStages + s); }
  __device__ unsigned v_free(int s) const { return barrier(3 * kKStages + kVStages + s); }
  __device__ unsigned v_raw(int s) const { return barrier(3 * kKStages + 2 * kVStages + s); }
  __device__ unsigned q_full(int b) const { return barrier(3 * kKStages + 3 * kVStages + b); }
  __device__ unsigned q_free(int b) const { return barrier(3 * kKStages + 3 * kVStages + kQStages + b); }

  __device__ void init() const {
    constexpr int kWarps = 4 * kShape.consumers;
    for (int s = 0; s < kKStages; ++s) {
      mbarrier_init(k_full(s), 1);
      mbarrier_init(k_free(s), kArrivalsPerWarp * (kWarps + 1) +
                                   1);  // the warp that zero-fills V and the thread that loads it read the Step too
      mbarrier_init(step_full(s), 1);
      st_shared_s32(step(s), 0);  // without Step::kPhase
    }
    for (int s = 0; s < kVStages; ++s) {
      mbarrier_init(v_full(s), 1);
      mbarrier_init(v_free(s), kArrivalsPerWarp * kWarps);
      mbarrier_init(v_raw(s), 1);
    }
    for (int b = 0; b < kQStages; ++b) {
      mbarrier_init(q_full(b), 1);
      mbarrier_init(q_free(b), kArrivalsPerWarp * kWarps);
    }
    fence_mbarrier_init();
  }
};

__device__ inline Step read_step(unsigned address) {
  Step s;
  asm volatile("ld.shared.v4.s32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(s.flags), "=r"(s.rows), "=r"(s.keys), "=r"(s.band)
               : "r"(address));
  return s;
}
template <bool kNumber, bool kSplits = false>
__device__ inline QueryTile read_tile(unsigned address) {
  QueryTile t;
  asm volatile("ld.shared.v2.s32 {%0,%1}, [%2];\n" : "=r"(t.row), "=r"(t.rows_unit) : "r"(address + 16));
  t.tile = kNumber || kSplits ? ld_shared_s32(address + 32) : 0;
  t.split_of = kSplits ? ld_shared_s32(address + 36) : 0;
  return t;
}
// The step's first key and K/V head.
__device__ inline int2 read_key_and_head(unsigned address) {
  int2 place;
  asm volatile("ld.shared.v2.s32 {%0,%1}, [%2];\n" : "=r"(place.x), "=r"(place.y) : "r"(address + 24));
  return place;
}
// Tiles are claimed longest first. Unit by unit would keep K and V in the L2 cache, but the last unit's longest tile
// would start when other blocks are done. So the longest eighth goes first, unit by unit, then the next eighth, the
// next quarter, and the rest.
struct Item {
  int unit, tile;
};
__device__ inline Item item_at(int item, int tiles, int units) {
  int begin = 0;
  for (int eighths = 1; eighths < 8; eighths *= 2) {
    const int end = static_cast<int>(static_cast<Index>(tiles) * eighths / 8);
    if (item < end * units)
      return {(item - begin * units) / (end - begin), begin + (item - begin * units) % (end - begin)};
    begin = end;
  }
  return {(item - begin * units) / (tiles - begin), begin + (item - begin * units) % (tiles - begin)};
}

// A call of QuerySteps starts with the tiles that the previous call ended with, whose sums are still in the L2 cache,
// and ends with other short tiles: the last third and the third before it alternate.
__device__ inline int l2_order(int item, int items, const StepAccumulators& steps) {
  if (steps.sums == nullptr || steps.first) return item;
  const int third = items / 3;
  if (steps.odd) return item < third ? items - 1 - item : item - third;
  return item < third ? items - third - 1 - item : item < items - third ? item - third : item;
}

// The thread that claims tiles and loads Q and K.
template <Width kWidth, bool kSplits>
struct Producer {
  static constexpr ForwardShape kShape = forward_shape(kWidth);
  using Iterator = KeyStepIterator<kShape.keys, kShape.consumers, kSplits>;
  const ForwardParams& params;
  const SharedMemory<kWidth>& shared;
  PipelineState<kShape.k_stages> stage = {};
  PipelineState<kShape.q_stages> buffer = {};

  // The current tile.
  ForwardItem item = {};
  int unit = 0, kv_head = 0;

  __device__ void run() {
    prefetch_tensormap(params.q);
    prefetch_tensormap(params.k);
    const int heads_inverse = (0x10000 + params.heads - 1) / params.heads;
    const int per_tile = kSplits ? params.splits.items() : 1;
    const auto all_tiles = [&] { return count_at(params.tile_count, params.tiles); };
    for (int next = static_cast<int>(blockIdx.x); next < all_tiles() * params.units * per_tile;) {
      const int tiles = all_tiles();
      const Item at = item_at(l2_order(next / per_tile, tiles * params.units, params.steps), tiles, params.units);
      item = item_of(params, at.tile);
      unit = at.unit;
      kv_head = params.kv_head != nullptr ? params.kv_head[unit] : unit / params.units_of_group;
      int claimed = -1;
      // Claimed only at the last step, because another block that is done could take the work. The atomic's latency
      // overlaps the wait for a free stage.
      const auto claim = [&] { claimed = atomicAdd(params.counter, 1); };
      if constexpr (kSplits) {
        griddepcontrol_wait();
        const SplitRange splits = splits_of(params.slices, item, params.splits.keys);
        for (int n = next % per_tile; n < splits.count; n += per_tile) {
          Iterator iterator(params.slices, item, heads_inverse, (splits.first + n) * params.splits.keys,
                            params.splits.keys);
          produce_steps(iterator, iterator.start(), n | splits.count << 16, [&] {
            if (n + per_tile >= splits.count) claim();
          });
        }
      } else {
        Iterator iterator(params.slices, item, heads_inverse);
        const bool sees = iterator.start();
        // With programmatic launch the previous kernel may still run here. Work lists are uploaded before any such
        // kernel; everything else waits for griddepcontrol.
        if (sees && params.steps.sums != nullptr && next == static_cast<int>(blockIdx.x))
          prefetch_first(iterator.base());
        griddepcontrol_wait();
        if (sees) produce_steps(iterator, true, 0, claim);
      }
      if (claimed < 0) claim();  // the tile sees no keys
      if (claimed == all_tiles() * params.units * per_tile - 1)
        *params.counter = 0;  // the last claim resets the counter for the next launch
      next = static_cast<int>(gridDim.x) + claimed;
    }
    mbarrier_wait(shared.k_free(stage.index), stage.phase ^ 1);
    st_shared_v4_s32(shared.step(stage.index), Step::kStop | Step::phase_flag(stage.phase), 0, 0, 0);
    mbarrier_arrive(shared.step_full(stage.index));
    mbarrier_arrive(shared.k_full(stage.index));
  }

  // All steps of a tile, or of one split of it. `last` is called before the last step waits for a free stage.
  template <class Last>
  __device__ void produce_steps(Iterator& iterator, bool sees, int split_of, const Last& last) {
    bool more = sees, first = true;
    do {
      // A split without keys between two that have some: one step that nobody sees anything of.
      const int key = sees ? iterator.base() : item.slice.k_first;
      const Step step = sees ? iterator.step(params.k_rows) : Step::empty();
      more = sees && iterator.next();
      if (!more) last();
      if (first) load_q();
      load_k(step, (first ? Step::kFirst | ends() : 0) | (more ? 0 : Step::kLast), key, split_of);
      first = false;
    } while (more);
  }
  __device__ int ends() const {
    return params.steps.sums != nullptr && (params.steps.last || item.ends != 0) ? Step::kEnds : 0;
  }
  __device__ void prefetch_first(int key) const {
    for (int box = 0; box < kShape.dim_qk / 64; ++box) {
      tma_prefetch_3d(params.q, 64 * box, unit * params.heads, item.begin);
      tma_prefetch_3d(params.k, 64 * box, kv_head, key);
    }
    for (int box = 0; box < kShape.dim_v / 64; ++box) tma_prefetch_3d(params.v, 64 * box, kv_head, key);
  }
  __device__ void load_q() {
    const unsigned q_box = static_cast<unsigned>(params.heads * params.rows) * 128;
    mbarrier_wait(shared.q_free(buffer.index), buffer.phase ^ 1);
    const bool resumes = params.steps.sums != nullptr && !params.steps.first;
    mbarrier_arrive_expect_tx(shared.q_full(buffer.index),
                              q_box * (kShape.dim_qk / 64) + (resumes ? kShape.state_bytes() : 0));
    if (resumes)
      cp_async_bulk(shared.states(buffer.index),
                    params.steps.states + params.steps.block(unit, item.tile, params.tiles) * kShape.rows(),
                    kShape.state_bytes(), shared.q_full(buffer.index));
    for (int box = 0; box < kShape.dim_qk / 64; ++box)
      tma_load_3d_evict_first(shared.q(buffer.index) + static_cast<unsigned>(box * kShape.rows() * 128), params.q,
                              shared.q_full(buffer.index), 64 * box, unit * params.heads, item.begin);
    buffer.advance();
  }
  __device__ void load_k(const Step& step, int flags, int key, int split_of) {
    mbarrier_wait(shared.k_free(stage.index), stage.phase ^ 1);
    st_shared_v4_s32(shared.step(stage.index), step.flags | flags | Step::phase_flag(stage.phase), step.rows, step.keys,
                     step.band);
    st_shared_v4_s32(shared.step(stage.index) + 16, item.begin, (item.end - item.begin) | unit << 8, key, kv_head);
    if (kSplits || params.steps.sums != nullptr) st_shared_s32(shared.step(stage.index) + 32, item.tile);
    if constexpr (kSplits) st_shared_s32(shared.step(stage.index) + 36, split_of);
    mbarrier_arrive(shared.step_full(stage.index));
    mbarrier_arrive_expect_tx(shared.k_full(stage.index), kShape.k_bytes());
    for (int box = 0; box < kShape.dim_qk / 64; ++box)
      tma_load_3d(shared.k(stage.index) + static_cast<unsigned>(box * kShape.keys * 128), params.k,
                  shared.k_full(stage.index), 64 * box, kv_head, key);
    stage.advance();
  }
};

// The thread that loads V. V's stages are freed later than K's, and K must not wait for that.
template <Width kWidth>
__device__ void load_v(const ForwardParams& params, const SharedMemory<kWidth>& shared) {
  constexpr ForwardShape kShape = forward_shape(kWidth);
  prefetch_tensormap(params.v);
  PipelineState<kShape.k_stages> stage;
  PipelineState<kShape.v_stages> values;
  while (true) {
    mbarrier_wait(shared.step_full(stage.index), stage.phase);
    const Step step = read_step(shared.step(stage.index));
    const int2 where = read_key_and_head(shared.step(stage.index));
    mbarrier_arrive(shared.k_free(stage.index));
    if ((step.flags & Step::kStop) != 0) return;
    mbarrier_wait(shared.v_free(values.index), values.phase ^ 1);
    const unsigned full =
        (step.flags & Step::kZeroFill) != 0 ? shared.v_raw(values.index) : shared.v_full(values.index);
    mbarrier_arrive_expect_tx(full, kShape.v_bytes());
    for (int box = 0; box < kShape.dim_v / 64; ++box)
      tma_load_3d(shared.v(values.index) + static_cast<unsigned>(box * kShape.keys * 128), params.v, full, 64 * box,
                  where.y, where.x);
    stage.advance();
    values.advance();
  }
}

// One warp: prefetches a tile's saved sums into the L2 cache, where they are soon added to or read.
template <Width kWidth>
__device__ void prefetch_sums(const ForwardParams& params, const QueryTile& tile) {
  constexpr ForwardShape kShape = forward_shape(kWidth);
  constexpr int kFloats = kShape.rows() * kShape.dim_v / 32;  // floats of a lane
  const Index block = params.steps.block(tile.unit(), tile.tile, params.tiles);
  cp_async_bulk_prefetch_l2(
      params.steps.sums + block * (kShape.rows() * kShape.dim_v) + static_cast<int>(threadIdx.x % 32) * kFloats,
      kFloats * 4);
}

// One warp zero-fills a tile's rows outside [begin, end): 16 bytes per lane, four rows at a time.
template <int kRows, int kColumns>
__device__ void zero_fill_outside(unsigned tile, int begin, int end) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto clear = [&](int row) {
#pragma unroll
    for (int box = 0; box < kColumns / 64; ++box)
      st_shared_v4_s32(tile + static_cast<unsigned>((box * kRows + row) * 128 + lane % 8 * 16), 0, 0, 0, 0);
  };
#pragma unroll 4
  for (int row = lane / 8; row < begin; row += 4) clear(row);
#pragma unroll 4
  for (int row = end + lane / 8; row < kRows; row += 4) clear(row);
}

// One warp zero-fills keys of V that lie outside their slice, so that P = 0 is never multiplied by NaN or infinity.
template <Width kWidth>
__device__ void zero_fill_v(const ForwardParams& params, const SharedMemory<kWidth>& shared) {
  constexpr ForwardShape kShape = forward_shape(kWidth);
  const int lane = static_cast<int>(threadIdx.x % 32);
  PipelineState<kShape.k_stages> stage;
  PipelineState<kShape.v_stages> values;
  unsigned raw_phases = 0;  // one bit per stage
  while (true) {
    mbarrier_wait(shared.step_full(stage.index), stage.phase);
    const Step step = read_step(shared.step(stage.index));
    const QueryTile tile = read_tile<true>(shared.step(stage.index));
    __syncwarp();
    mbarrier_arrive_elected(shared.k_free(stage.index));
    if ((step.flags & Step::kStop) != 0) return;
    if ((step.flags & Step::kFirst) != 0 && params.steps.sums != nullptr && !params.steps.first)
      prefetch_sums<kWidth>(params, tile);
    if ((step.flags & Step::kZeroFill) != 0) {
      mbarrier_wait(shared.v_raw(values.index), raw_phases >> values.index & 1);
      raw_phases ^= 1u << values.index;
      zero_fill_outside<kShape.keys, kShape.dim_v>(shared.v(values.index), Step::low(step.keys), Step::high(step.keys));
      fence_proxy_async_shared();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared.v_full(values.index));
    }
    stage.advance();
    values.advance();
  }
}

// One warp writes the rows of tiles without slices.
__device__ inline void write_rows_without_slices(const ForwardParams& params) {
  if (params.partial.states != nullptr || params.steps.sums != nullptr) return;  // saved states stay as they are
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int tiles = count_at(params.tile_count, params.tiles);
  for (int n = static_cast<int>(blockIdx.x); n < tiles; n += static_cast<int>(gridDim.x)) {
    const ForwardItem item = item_of(params, n);
    if (item.first < item.last) continue;
    const int dim = static_cast<int>(params.out.dim),
              pieces = params.vec8_out ? dim / 8 : dim;  // elements stored at once
    for (int i = lane; i < (item.end - item.begin) * params.heads_q * pieces; i += 32) {
      const int row = item.begin + i / pieces / params.heads_q, head = i / pieces % params.heads_q, piece = i % pieces;
      const Index at = offset_of(params.out, row, head);
      if (params.vec8_out)
        *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(params.out.data) + at + 8 * piece) = uint4{};
      else
        static_cast<float*>(params.out.data)[at + piece] = 0;
      if (piece == 0 && params.lse.given())
        store_element(params.lse.data, params.lse.dtype, offset_of(params.lse, row, head),
                      sink_logit(params.sink, head));
    }
  }
}

}  // namespace weft::cuda::sm90
