// The Hopper forward's shared memory, and the warpgroup that fills it: one thread hands out tiles and fetches Q and K,
// one fetches V, a warp mends V, one writes what no slice touches.
#pragma once

#include "kernel/cuda/rows.cuh"
#include "kernel/cuda/sm90/call.h"
#include "kernel/cuda/sm90/forward/key_steps.cuh"
#include "kernel/cuda/sm90/ptx/pipeline.cuh"
#include "kernel/cuda/sm90/ptx/ptx.cuh"

namespace weft::cuda::sm90 {

template <Width kWidth>
struct Shared {
  static constexpr ForwardShape kShape = forward_shape(kWidth);
  static constexpr unsigned kQBytes = kShape.q_bytes(), kKBytes = kShape.k_bytes(), kVBytes = kShape.v_bytes();
  static constexpr int kK = kShape.k_stages, kV = kShape.v_stages, kQBuffers = kShape.q_buffers;
  unsigned base;

  __device__ unsigned q(int buffer) const { return base + static_cast<unsigned>(buffer) * kQBytes; }
  __device__ unsigned k(int stage) const { return base + kQBuffers * kQBytes + static_cast<unsigned>(stage) * kKBytes; }
  __device__ unsigned v(int stage) const {
    return base + kQBuffers * kQBytes + kK * kKBytes + static_cast<unsigned>(stage) * kVBytes;
  }
  __device__ unsigned step(int stage) const {
    return base + static_cast<unsigned>(kShape.tile_bytes()) + static_cast<unsigned>(stage) * ForwardShape::kStepBytes;
  }
  __device__ unsigned states(int buffer) const {  // of the rows of q(buffer)
    return base + static_cast<unsigned>(kShape.tile_bytes()) + kK * ForwardShape::kStepBytes +
           static_cast<unsigned>(buffer * kShape.state_bytes());
  }
  __device__ unsigned barrier(int n) const { return states(kQBuffers) + static_cast<unsigned>(n) * 8; }
  // full: the tile is there; free: everybody has read it; raw: V is there, but must be mended before it is full.
  __device__ unsigned k_full(int s) const { return barrier(s); }
  __device__ unsigned k_free(int s) const { return barrier(kK + s); }
  __device__ unsigned step_full(int s) const { return barrier(2 * kK + s); }  // the step is written
  __device__ unsigned v_full(int s) const { return barrier(3 * kK + s); }
  __device__ unsigned v_free(int s) const { return barrier(3 * kK + kV + s); }
  __device__ unsigned v_raw(int s) const { return barrier(3 * kK + 2 * kV + s); }
  __device__ unsigned q_full(int b) const { return barrier(3 * kK + 3 * kV + b); }
  __device__ unsigned q_free(int b) const { return barrier(3 * kK + 3 * kV + kQBuffers + b); }

  __device__ void init() const {
    constexpr int kWarps = 4 * kShape.groups;
    for (int s = 0; s < kK; ++s) {
      barrier_init(k_full(s), 1);
      barrier_init(k_free(s), kArrivalsOfWarp * (kWarps + 1) + 1);  // who mends or fetches V reads it too
      barrier_init(step_full(s), 1);
      write_word(step(s), 0);  // not Step::kOdd
    }
    for (int s = 0; s < kV; ++s) {
      barrier_init(v_full(s), 1);
      barrier_init(v_free(s), kArrivalsOfWarp * kWarps);
      barrier_init(v_raw(s), 1);
    }
    for (int b = 0; b < kQBuffers; ++b) {
      barrier_init(q_full(b), 1);
      barrier_init(q_free(b), kArrivalsOfWarp * kWarps);
    }
    barriers_ready();
  }
};

__device__ inline Step read_step(unsigned at) {
  Step s;
  asm volatile("ld.shared.v4.s32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(s.flags), "=r"(s.rows), "=r"(s.keys), "=r"(s.band)
               : "r"(at));
  return s;
}
template <bool kNumber, bool kParts = false>
__device__ inline StepTile read_tile(unsigned at) {
  StepTile t;
  asm volatile("ld.shared.v2.s32 {%0,%1}, [%2];\n" : "=r"(t.row), "=r"(t.rows_unit) : "r"(at + 16));
  t.tile = kNumber || kParts ? read_word(at + 32) : 0;
  t.part_of = kParts ? read_word(at + 36) : 0;
  return t;
}
// Its first key, and the K/V head.
__device__ inline int2 read_place(unsigned at) {
  int2 place;
  asm volatile("ld.shared.v2.s32 {%0,%1}, [%2];\n" : "=r"(place.x), "=r"(place.y) : "r"(at + 24));
  return place;
}
// Tiles are handed out longest first. Unit by unit would keep K and V in the cache, but the last unit's longest tile
// would then start when others are done; so the longest eighth goes first unit by unit, then the next eighth, the next
// quarter, the rest.
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

// A call of QuerySteps begins with the tiles that the last one ended with, whose sums are still in the L2 cache, and
// ends with others that are short: the last third and the one before it by turns.
__device__ inline int turned(int item, int items, const StepSums& steps) {
  if (steps.sums == nullptr || steps.first) return item;
  const int third = items / 3;
  if (steps.odd) return item < third ? items - 1 - item : item - third;
  return item < third ? items - third - 1 - item : item < items - third ? item - third : item;
}

// What one thread, who hands out tiles and fetches Q and K, knows from tile to tile.
template <Width kWidth, bool kParts>
struct Fetch {
  static constexpr ForwardShape kShape = forward_shape(kWidth);
  using Walk = StepWalk<kShape.keys, kShape.groups, kParts>;
  const ForwardCall& call;
  const Shared<kWidth>& shared;
  Ring<kShape.k_stages> stage = {};
  Ring<kShape.q_buffers> buffer = {};

  // The tile at hand.
  ForwardItem item = {};
  int unit = 0, kv_head = 0;

  __device__ void run() {
    prefetch_map(call.q);
    prefetch_map(call.k);
    const int heads_inverse = (0x10000 + call.heads - 1) / call.heads;
    const int per_tile = kParts ? call.parts.items() : 1, items = call.tiles * call.units * per_tile;
    for (int next = static_cast<int>(blockIdx.x); next < items;) {
      const Item at = item_at(turned(next / per_tile, items / per_tile, call.steps), call.tiles, call.units);
      item = item_of(call, at.tile);
      unit = at.unit;
      kv_head = call.kv_head != nullptr ? call.kv_head[unit] : unit / call.units_of_group;
      int taken = -1;
      // Not before the last step: what a block holds back, others that are done could do. The answer comes while it
      // waits.
      const auto take = [&] { taken = atomicAdd(call.counter, 1); };
      if constexpr (kParts) {
        await_before();
        const PartRange parts = parts_of(call.list.slices, item, call.parts.keys);
        for (int n = next % per_tile; n < parts.count; n += per_tile) {
          Walk walk(call.list.slices, item, heads_inverse, (parts.first + n) * call.parts.keys, call.parts.keys);
          walk_through(walk, walk.start(), n | parts.count << 16, [&] {
            if (n + per_tile >= parts.count) take();
          });
        }
      } else {
        Walk walk(call.list.slices, item, heads_inverse);
        const bool sees = walk.start();
        // If launched early: lists were sent, which no kernel is early for; all else may come from before.
        if (sees && call.steps.sums != nullptr && next == static_cast<int>(blockIdx.x)) ask_for_first(walk.base());
        await_before();
        if (sees) walk_through(walk, true, 0, take);
      }
      if (taken < 0) take();                      // nothing to see
      if (taken == items - 1) *call.counter = 0;  // the last one asked: for the next call
      next = static_cast<int>(gridDim.x) + taken;
    }
    wait(shared.k_free(stage.at), stage.parity ^ 1);
    write_four(shared.step(stage.at), Step::kStop | Step::odd(stage.parity), 0, 0, 0);
    arrive(shared.step_full(stage.at));
    arrive(shared.k_full(stage.at));
  }

  // All steps of a tile, or of a part of it; `last` is called before the last one waits for its place.
  template <class Last>
  __device__ void walk_through(Walk& walk, bool sees, int part_of, const Last& last) {
    bool more = sees, first = true;
    do {
      // Of a part without keys between two that have some: a step that nobody sees anything of.
      const int key = sees ? walk.base() : item.slice.k_first;
      const Step step = sees ? walk.step(call.k_rows) : Step::empty();
      more = sees && walk.next();
      if (!more) last();
      if (first) fetch_queries();
      fetch_keys(step, (first ? Step::kFirst | ends() : 0) | (more ? 0 : Step::kLast), key, part_of);
      first = false;
    } while (more);
  }
  __device__ int ends() const {
    return call.steps.sums != nullptr && (call.steps.last || item.ends != 0) ? Step::kEnds : 0;
  }
  __device__ void ask_for_first(int key) const {
    for (int box = 0; box < kShape.k / 64; ++box) {
      prefetch_box(call.q, 64 * box, unit * call.heads, item.begin);
      prefetch_box(call.k, 64 * box, kv_head, key);
    }
    for (int box = 0; box < kShape.v / 64; ++box) prefetch_box(call.v, 64 * box, kv_head, key);
  }
  __device__ void fetch_queries() {
    const unsigned q_box = static_cast<unsigned>(call.heads * call.rows) * 128;
    wait(shared.q_free(buffer.at), buffer.parity ^ 1);
    const bool goes_on = call.steps.sums != nullptr && !call.steps.first;
    arrive_expecting(shared.q_full(buffer.at), q_box * (kShape.k / 64) + (goes_on ? kShape.state_bytes() : 0));
    if (goes_on)
      load_bytes(shared.states(buffer.at),
                 call.steps.states + call.steps.block(unit, item.tile, call.tiles) * kShape.rows(),
                 kShape.state_bytes(), shared.q_full(buffer.at));
    for (int box = 0; box < kShape.k / 64; ++box)
      load_box_once(shared.q(buffer.at) + static_cast<unsigned>(box * kShape.rows() * 128), call.q,
                    shared.q_full(buffer.at), 64 * box, unit * call.heads, item.begin);
    buffer.next();
  }
  __device__ void fetch_keys(const Step& step, int flags, int key, int part_of) {
    wait(shared.k_free(stage.at), stage.parity ^ 1);
    write_four(shared.step(stage.at), step.flags | flags | Step::odd(stage.parity), step.rows, step.keys, step.band);
    write_four(shared.step(stage.at) + 16, item.begin, (item.end - item.begin) | unit << 8, key, kv_head);
    if (kParts || call.steps.sums != nullptr) write_word(shared.step(stage.at) + 32, item.tile);
    if constexpr (kParts) write_word(shared.step(stage.at) + 36, part_of);
    arrive(shared.step_full(stage.at));
    arrive_expecting(shared.k_full(stage.at), kShape.k_bytes());
    for (int box = 0; box < kShape.k / 64; ++box)
      load_box(shared.k(stage.at) + static_cast<unsigned>(box * kShape.keys * 128), call.k, shared.k_full(stage.at),
               64 * box, kv_head, key);
    stage.next();
  }
};

// Another: V. It is free later than K, and K does not wait for that.
template <Width kWidth>
__device__ void fetch_values(const ForwardCall& call, const Shared<kWidth>& shared) {
  constexpr ForwardShape kShape = forward_shape(kWidth);
  prefetch_map(call.v);
  Ring<kShape.k_stages> stage;
  Ring<kShape.v_stages> values;
  while (true) {
    wait(shared.step_full(stage.at), stage.parity);
    const Step step = read_step(shared.step(stage.at));
    const int2 where = read_place(shared.step(stage.at));
    arrive(shared.k_free(stage.at));
    if ((step.flags & Step::kStop) != 0) return;
    wait(shared.v_free(values.at), values.parity ^ 1);
    const unsigned full = (step.flags & Step::kMended) != 0 ? shared.v_raw(values.at) : shared.v_full(values.at);
    arrive_expecting(full, kShape.v_bytes());
    for (int box = 0; box < kShape.v / 64; ++box)
      load_box(shared.v(values.at) + static_cast<unsigned>(box * kShape.keys * 128), call.v, full, 64 * box, where.y,
               where.x);
    stage.next();
    values.next();
  }
}

// A warp: sums of a tile that go on, into the L2 cache, where they are soon added to or read.
template <Width kWidth>
__device__ void prefetch_sums(const ForwardCall& call, const StepTile& tile) {
  constexpr ForwardShape kShape = forward_shape(kWidth);
  constexpr int kFloats = kShape.rows() * kShape.v / 32;  // a lane
  const Index block = call.steps.block(tile.unit(), tile.tile, call.tiles);
  prefetch_bytes(call.steps.sums + block * (kShape.rows() * kShape.v) + static_cast<int>(threadIdx.x % 32) * kFloats,
                 kFloats * 4);
}

// A warp makes zeros of a tile's rows, but for [begin, end): 16 bytes a lane, four rows at a time.
template <int kRows, int kColumns>
__device__ void clear_outside(unsigned tile, int begin, int end) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto clear = [&](int row) {
#pragma unroll
    for (int box = 0; box < kColumns / 64; ++box)
      write_four(tile + static_cast<unsigned>((box * kRows + row) * 128 + lane % 8 * 16), 0, 0, 0, 0);
  };
#pragma unroll 4
  for (int row = lane / 8; row < begin; row += 4) clear(row);
#pragma unroll 4
  for (int row = end + lane / 8; row < kRows; row += 4) clear(row);
}

// A warp: keys that lie outside their slice become zeros in V, so that nothing there is multiplied.
template <Width kWidth>
__device__ void mend(const ForwardCall& call, const Shared<kWidth>& shared) {
  constexpr ForwardShape kShape = forward_shape(kWidth);
  const int lane = static_cast<int>(threadIdx.x % 32);
  Ring<kShape.k_stages> stage;
  Ring<kShape.v_stages> values;
  unsigned raw_parity = 0;  // a bit a stage
  while (true) {
    wait(shared.step_full(stage.at), stage.parity);
    const Step step = read_step(shared.step(stage.at));
    const StepTile tile = read_tile<true>(shared.step(stage.at));
    __syncwarp();
    arrive_together(shared.k_free(stage.at));
    if ((step.flags & Step::kStop) != 0) return;
    if ((step.flags & Step::kFirst) != 0 && call.steps.sums != nullptr && !call.steps.first)
      prefetch_sums<kWidth>(call, tile);
    if ((step.flags & Step::kMended) != 0) {
      wait(shared.v_raw(values.at), raw_parity >> values.at & 1);
      raw_parity ^= 1u << values.at;
      clear_outside<kShape.keys, kShape.v>(shared.v(values.at), Step::low(step.keys), Step::high(step.keys));
      stores_visible();
      __syncwarp();
      if (lane == 0) arrive(shared.v_full(values.at));
    }
    stage.next();
    values.next();
  }
}

// A warp: rows of tiles without slices.
__device__ inline void clear_rest(const ForwardCall& call) {
  if (call.partial.states != nullptr || call.steps.sums != nullptr) return;  // they keep what they have
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int n = static_cast<int>(blockIdx.x); n < call.tiles; n += static_cast<int>(gridDim.x)) {
    const ForwardItem item = item_of(call, n);
    if (item.first < item.last) continue;
    const int dim = static_cast<int>(call.out.dim), pieces = call.wide_out ? dim / 8 : dim;  // stored at once
    for (int i = lane; i < (item.end - item.begin) * call.heads_q * pieces; i += 32) {
      const int row = item.begin + i / pieces / call.heads_q, head = i / pieces % call.heads_q, piece = i % pieces;
      const Index at = offset_of(call.out, row, head);
      if (call.wide_out)
        *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(call.out.data) + at + 8 * piece) = uint4{};
      else
        static_cast<float*>(call.out.data)[at + piece] = 0;
      if (piece == 0 && call.lse.given())
        store_element(call.lse.data, call.lse.dtype, offset_of(call.lse, row, head), sink_logit(call.sink, head));
    }
  }
}

}  // namespace weft::cuda::sm90
