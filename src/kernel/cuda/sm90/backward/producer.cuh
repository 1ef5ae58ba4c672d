// The Hopper backward's shared memory, and the warpgroup that fills it: one warp walks, fetches and mends; where dQ is
// added in turn, one for each warpgroup adds it.
#pragma once

#include "kernel/cuda/rows.cuh"
#include "kernel/cuda/sm90/backward/query_steps.cuh"
#include "kernel/cuda/sm90/backward/unseen_keys.cuh"
#include "kernel/cuda/sm90/fragments.cuh"
#include "kernel/cuda/sm90/ptx/pipeline.cuh"
#include "kernel/cuda/sm90/ptx/ptx.cuh"

namespace weft::cuda::sm90 {

template <Width kWidth, Dq kDq>
struct BackwardShared {
  static constexpr BackwardShape kShape = backward_shape(kWidth, kDq);
  static constexpr int kStages = kShape.stages, kDsBuffers = kShape.ds_buffers(), kGroups = kShape.groups;
  static constexpr int kKeyBuffers = kShape.key_buffers;
  static constexpr unsigned kVAt = kKeyBuffers * kShape.k_bytes(), kQAt = kVAt + kKeyBuffers * kShape.v_bytes(),
                            kDoutAt = kQAt + kStages * kShape.q_bytes(),
                            kDsAt = kDoutAt + kStages * kShape.dout_bytes(),
                            kPAt = kDsAt + kDsBuffers * kShape.ds_bytes(),
                            kLseAt = kPAt + kShape.p_buffers * kShape.ds_bytes(),
                            kDeltaAt = kLseAt + kStages * kShape.statistics_bytes(),
                            kStepAt = kDeltaAt + kStages * kShape.statistics_bytes(),
                            kItemAt = kStepAt + kStages * BackwardShape::kStepBytes,
                            kBarrierAt = kItemAt + kKeyBuffers * BackwardShape::kItemBytes;
  static constexpr int kParts = kShape.parts();
  static constexpr int kSteps = kGroups == 3 ? 3 : 1;  // from one whose dQ a warpgroup makes to the next
  static constexpr unsigned kPartsAt = kShape.parts_at(),
                            kVisitAt = kPartsAt + kGroups * kParts * BackwardShape::kPartBytes,
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
  // full: it is there; free: everybody has read it; raw: it is there, but must be mended before it is full.
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
  __device__ unsigned ds_full(int b) const { return ds_free(kDsBuffers + b); }  // of three warpgroups

  // Dq::in_turn: dQ of a warpgroup; the tile of dQ and the turn of a step.
  __device__ unsigned part(int group, int b) const {
    return base + kPartsAt + times(group * kParts + b, BackwardShape::kPartBytes);
  }
  __device__ unsigned visit(int n) const { return base + kVisitAt + times(n % BackwardShape::kVisits, 8); }
  __device__ unsigned part_full(int group, int b) const { return base + kPartBarrierAt + times(group * kParts + b, 8); }
  __device__ unsigned part_free(int group, int b) const { return part_full(group + kGroups, b); }

  __device__ void init() const {
    constexpr int kOfGroup = 4 * kArrivalsOfWarp, kArrivals = kGroups * kOfGroup;  // of warps that multiply
    for (int b = 0; b < kKeyBuffers; ++b) {
      barrier_init(keys_full(b), 1);
      barrier_init(keys_raw(b), 1);
      barrier_init(keys_free(b), kArrivals);
    }
    for (int s = 0; s < kStages; ++s) {
      for (const unsigned b : {q_full(s), q_raw(s), dout_full(s), dout_raw(s)}) barrier_init(b, 1);
      barrier_init(q_free(s), kArrivals);
      barrier_init(dout_free(s), kArrivals);
    }
    for (int b = 0; b < kDsBuffers; ++b) {
      barrier_init(ds_free(b), kGroups == 3 ? kOfGroup : kArrivals);
      barrier_init(ds_full(b), kArrivals);
    }
    if constexpr (kDq == Dq::in_turn)
      for (int p = 0; p < kGroups * kParts; ++p) {
        barrier_init(part_full(0, p), kOfGroup);
        barrier_init(part_free(0, p), 1);
      }
    barriers_ready();
  }
};

__device__ inline void write_step(unsigned at, const RowStep& s) {
  write_four(at, s.flags, s.rows, s.keys, s.band);
  asm volatile("st.shared.s32 [%0], %1;\n" ::"r"(at + 16), "r"(s.sums) : "memory");
}
__device__ inline int read_sums(unsigned at) { return read_word(at + 16); }
__device__ inline RowStep read_row_step(unsigned at) {
  RowStep s;
  asm volatile("ld.shared.v4.s32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(s.flags), "=r"(s.rows), "=r"(s.keys), "=r"(s.band)
               : "r"(at));
  asm volatile("ld.shared.s32 %0, [%1];\n" : "=r"(s.sums) : "r"(at + 16));
  return s;
}

// A warp makes zeros of rows of a tile; 16 bytes a lane, four rows at a time.
template <int kRows, int kColumns, class Dead>
__device__ void clear_rows(unsigned tile, const Dead& dead) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int r = lane / 8; r < kRows; r += 4)
    if (dead(r))
      for (int box = 0; box < kColumns / 64; ++box)
        write_four(tile + static_cast<unsigned>((box * kRows + r) * 128 + lane % 8 * 16), 0, 0, 0, 0);
}

template <int kColumns>
__device__ void load_boxes(unsigned to, const CUtensorMap& map, unsigned barrier, int rows, int head, int row) {
  for (int box = 0; box < kColumns / 64; ++box)
    load_box(to + static_cast<unsigned>(box * rows * 128), map, barrier, 64 * box, head, row);
}

// What the warpgroups that multiply have to know of an item: first key, end, K/V head, flags; slices.
struct SharedItem {
  enum Flag : int {
    kUsed = 1,   // by a query head
    kMended = 2  // not all keys are shown
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

// K and V of an item. Keys that no slice shows become zeros: what lies there would be multiplied by zeros.
template <Width kWidth, Dq kDq>
__device__ void fetch_keys(const BackwardCall& call, const BackwardShared<kWidth, kDq>& shared,
                           const KeyItem<backward_shape(kWidth).keys>& item, int kv_head, int buffer,
                           unsigned& raw_parity) {
  constexpr BackwardShape kShape = backward_shape(kWidth);
  constexpr int kKeys = kShape.keys;
  const int lane = static_cast<int>(threadIdx.x % 32);
  bool covers = false;  // one slice shows them all; behind the buffer's last there are zeros already
  for (int m = item.first + lane; m < item.last; m += 32) {
    const WorkSlice& s = call.keys.list.slices[m];
    covers = covers || (s.k_begin <= item.begin && s.k_end >= item.end);
  }
  const bool used = item.has_work();
  const bool shown = __any_sync(0xffffffffu, covers);
  const bool mended = used && (!shown || (item.end - item.begin < kKeys && item.end < call.k_rows));
  const unsigned barrier = mended ? shared.keys_raw(buffer) : shared.keys_full(buffer);
  if (lane == 0) {
    write_four(shared.item(buffer), item.begin, item.end, kv_head,
               (used ? SharedItem::kUsed : 0) | (shown ? 0 : SharedItem::kMended));
    write_four(shared.item(buffer) + 16, item.first, item.last, 0, 0);
    if (used) {
      arrive_expecting(barrier, kShape.k_bytes() + kShape.v_bytes());
      load_boxes<kShape.k>(shared.k(buffer), call.k, barrier, kKeys, kv_head, item.begin);
      load_boxes<kShape.v>(shared.v(buffer), call.v, barrier, kKeys, kv_head, item.begin);
    } else {
      arrive(barrier);
    }
  }
  __syncwarp();
  if (!mended) return;
  wait(barrier, raw_parity >> buffer & 1);
  raw_parity ^= 1u << buffer;
  const auto dead = [&](int r) { return item.begin + r >= item.end || !item.is_live(call, item.begin + r); };
  clear_rows<kKeys, kShape.k>(shared.k(buffer), dead);
  clear_rows<kKeys, kShape.v>(shared.v(buffer), dead);
  stores_visible();
  __syncwarp();
  if (lane == 0) arrive(shared.keys_full(buffer));
}

// What goes on from item to item: the next step's stage and the parity of its barriers.
template <int kStages>
struct FetchState {
  Ring<kStages> ring;
  int steps = 0;
  unsigned raw_parity = 0;  // a bit a stage
  __device__ int stage() const { return ring.at; }
  __device__ unsigned parity() const { return ring.parity; }
  __device__ void next() {
    ring.next();
    ++steps;
  }
};
// In one register: there are few.
template <>
struct FetchState<2> {
  int steps = 0;
  unsigned raw_parity = 0;
  __device__ int stage() const { return steps & 1; }
  __device__ unsigned parity() const { return static_cast<unsigned>(steps) >> 1 & 1; }
  __device__ void next() { ++steps; }
};

// The rows of an item.
template <Width kWidth, Dq kDq>
__device__ void fetch_rows(const BackwardCall& call, const BackwardShared<kWidth, kDq>& shared,
                           const KeyItem<backward_shape(kWidth).keys>& item,
                           FetchState<backward_shape(kWidth, kDq).stages>& state) {
  constexpr BackwardShape kShape = backward_shape(kWidth);
  const int lane = static_cast<int>(threadIdx.x % 32);
  constexpr bool kIdles = kShape.groups == 2 && !has_one_turn(kWidth, kDq);
  RowWalk<kShape.keys, kDq == Dq::in_turn> walk(call, item);
  for (bool more = walk.start(); more;) {
    RowStep step = walk.step();
    const int row = walk.row(), head = walk.head();
    // What was there, of eight steps before, has been taken: a stage is freed two or three steps late; by then dQ of
    // the step before its own, or of the one before that, is handed over, and of each warpgroup all but the last part
    // taken.
    if constexpr (kDq == Dq::in_turn)
      if (lane == 0) write_two(shared.visit(state.steps), step.sums, walk.turn());
    more = walk.next();
    step.flags |= !more ? RowStep::kLast : kIdles ? walk.idle() * RowStep::kNextIdle : 0;
    const int stage = state.stage();
    const bool mended = (step.flags & RowStep::kMended) != 0;
    const float* statistics = call.statistics + static_cast<Index>(step.sums) * (2 * kShape.rows());
    const unsigned q_ready = mended ? shared.q_raw(stage) : shared.q_full(stage);
    const unsigned dout_ready = mended ? shared.dout_raw(stage) : shared.dout_full(stage);
    wait(shared.q_free(stage), state.parity() ^ 1);
    if (lane == 0) {
      write_step(shared.step(stage), step);
      arrive_expecting(q_ready, kShape.q_bytes() + kShape.statistics_bytes());
      load_boxes<kShape.k>(shared.q(stage), call.q, q_ready, kShape.rows(), head, row);
      load_bytes(shared.lse(stage), statistics, kShape.statistics_bytes(), q_ready);
    }
    __syncwarp();
    wait(shared.dout_free(stage), state.parity() ^ 1);
    if (lane == 0) {
      arrive_expecting(dout_ready, kShape.dout_bytes() + kShape.statistics_bytes());
      load_boxes<kShape.v>(shared.dout(stage), call.dout, dout_ready, kShape.rows(), head, row);
      load_bytes(shared.delta(stage), statistics + kShape.rows(), kShape.statistics_bytes(), dout_ready);
    }
    __syncwarp();
    if (mended) {
      const unsigned parity = state.raw_parity >> stage & 1;
      state.raw_parity ^= 1u << stage;
      const int begin = RowStep::low(step.rows) << call.rows.log_heads, end = RowStep::high(step.rows)
                                                                              << call.rows.log_heads;
      const auto dead = [&](int r) { return r < begin || r >= end; };
      wait(q_ready, parity);
      clear_rows<kShape.rows(), kShape.k>(shared.q(stage), dead);
      wait(dout_ready, parity);
      clear_rows<kShape.rows(), kShape.v>(shared.dout(stage), dead);
      stores_visible();
      __syncwarp();
      if (lane == 0) {
        arrive(shared.q_full(stage));
        arrive(shared.dout_full(stage));
      }
    }
    state.next();
  }
}

// A warp: hands out items, walks, fetches. In turn a block waits for items before its own, so the first one too is
// taken from the counter: blocks before this one may not have begun.
template <Width kWidth, Dq kDq>
__device__ void fetch(const BackwardCall& call, const BackwardShared<kWidth, kDq>& shared) {
  const int lane = static_cast<int>(threadIdx.x % 32), items = call.keys.active * call.heads_k;
  FetchState<backward_shape(kWidth, kDq).stages> state;
  Ring<shared.kKeyBuffers> keys;
  unsigned raw_parity = 0;  // a bit a buffer of keys
  const auto take = [&] {
    const int given = kDq == Dq::in_turn ? 0 : static_cast<int>(gridDim.x);  // without asking
    int taken = 0;
    if (lane == 0) {
      taken = atomicAdd(call.counter, 1);
      if (taken - items == static_cast<int>(gridDim.x) - given - 1) *call.counter = 0;  // the last: for the next call
      taken += given;
    }
    return __shfl_sync(0xffffffffu, taken, 0);
  };
  // Another call's counter until then.
  if (kDq == Dq::in_turn && !call.keys_ready) await_before();
  for (int next = kDq == Dq::in_turn ? take() : static_cast<int>(blockIdx.x); next < items;) {
    const int at = call.keys.order != nullptr ? call.keys.order[next] : next;
    const int kv_head = at / call.keys.active, tile = at % call.keys.active;
    const KeyItem<backward_shape(kWidth).keys> item(call, tile, kv_head);
    if (item.is_shown()) {                   // otherwise it has its zeros
      if (!call.keys_ready) await_before();  // lists were sent, which no kernel is early for
      wait(shared.keys_free(keys.at), keys.parity ^ 1);
      fetch_keys<kWidth, kDq>(call, shared, item, kv_head, keys.at, raw_parity);
      keys.next();
      if (call.keys_ready) await_before();  // statistics, and what is added to
      fetch_rows<kWidth, kDq>(call, shared, item, state);
    }
    // Not before: it would wait here while others have nothing to do. The last steps are still being multiplied.
    next = take();
  }
  wait(shared.keys_free(keys.at), keys.parity ^ 1);
  if (lane == 0) {
    write_four(shared.item(keys.at), -1, 0, 0, 0);
    if constexpr (kDq == Dq::in_turn)
      for (int n = 0; n < shared.kSteps; ++n) write_two(shared.visit(state.steps + n), -1, 0);
    arrive(shared.keys_full(keys.at));
  }
}

// A thread: adds what a warpgroup has made of dQ, when it is its turn.
template <Width kWidth>
__device__ void add_in_turn(const BackwardCall& call, const BackwardShared<kWidth, Dq::in_turn>& shared, int group) {
  constexpr BackwardShape kShape = backward_shape(kWidth, Dq::in_turn);
  constexpr int kPart = BackwardShape::kPartBytes / 4, kOfTile = kShape.parts_of_tile();
  Ring<kShape.parts()> part;
  for (int n = kOfTile == 1 ? group : 0;; n += shared.kSteps) {
    wait(shared.part_full(group, part.at), part.parity);
    const int2 visit = read_two(shared.visit(n));
    if (visit.x < 0) return;  // there is no more work
    const Index to = kOfTile * static_cast<Index>(visit.x) + (kOfTile == 1 ? 0 : group);
    stores_visible();  // of those that left it here
    await_number(call.additions + to, visit.y);
    add_bytes(call.dq_sums + to * kPart, shared.part(group, part.at), BackwardShape::kPartBytes);
    await_read();
    arrive(shared.part_free(group, part.at));
    await_added();
    publish(call.additions + to, visit.y + 1);
    part.next();
  }
}

// How a block begins: all threads.
template <Width kWidth, Dq kDq>
__device__ __forceinline__ BackwardShared<kWidth, kDq> begin_block(const unsigned char* memory) {
  const BackwardShared<kWidth, kDq> shared{same_in_all_lanes(shared_address(memory))};
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  let_next_begin();
  return shared;
}
// The warpgroup that does not multiply.
template <Width kWidth, Dq kDq>
__device__ __forceinline__ void serve(const BackwardCall& call, const BackwardShared<kWidth, kDq>& shared, int warp) {
  give_registers<backward_shape(kWidth).fetch_registers()>();
  if (warp == 0) {
    fetch<kWidth, kDq>(call, shared);
  } else {
    await_before();  // in every block: the kernel after must not pass the one before
    clear_unseen<backward_shape(kWidth).keys>(call);
    if constexpr (kDq == Dq::in_turn)
      if (warp <= shared.kGroups && threadIdx.x % 32 == 0) add_in_turn<kWidth>(call, shared, warp - 1);
  }
}

}  // namespace weft::cuda::sm90
