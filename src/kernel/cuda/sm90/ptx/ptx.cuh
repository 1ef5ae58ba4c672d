// Hopper's own instructions, one thin function each: barriers in shared memory, the bulk tensor copy, registers handed
// from warpgroup to warpgroup, named barriers. wgmma.cuh has the products. Addresses are of shared memory.
#pragma once

#include <cstdint>

#include <cuda.h>

namespace weft::cuda::sm90 {

// --- mbarrier: completes a phase when all have arrived and all announced bytes have landed ---

__device__ inline void barrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals));
}
// After the last init, before __syncthreads.
__device__ inline void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory"); }
__device__ inline void arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
// Of a warp that has read what a barrier guards the first lane arrives for all. racecheck does not see that the others
// had read before; for it each lane arrives for itself (WEFT_EACH_LANE_ARRIVES). Nor does it know that a flag which was
// read too early says so; for it none is.
#ifdef WEFT_EACH_LANE_ARRIVES
inline constexpr int kArrivalsOfWarp = 32;
inline constexpr bool kReadsEarly = false;
#else
inline constexpr int kArrivalsOfWarp = 1;
inline constexpr bool kReadsEarly = true;
#endif
__device__ __forceinline__ bool arrives() { return kArrivalsOfWarp == 32 || threadIdx.x % 32 == 0; }
// The same by whatever lane the machine picks, of a warp that is together: no branch, and no lane asks who it is.
__device__ __forceinline__ void arrive_together(unsigned barrier) {
  if constexpr (kArrivalsOfWarp == 32)
    arrive(barrier);
  else
    asm volatile(
        "{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}\n" ::"r"(barrier)
        : "memory");
}
__device__ inline void arrive_expecting(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
// Has the phase of this parity ended? A fresh barrier is in phase 0: parity 1 has, parity 0 has not.
__device__ inline bool has_ended(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}
// The same, without waiting a while for it.
__device__ inline bool has_ended_now(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}
// A barrier that nobody completes ends a debug build's kernel instead of hanging it.
__device__ inline void wait(unsigned barrier, unsigned parity) {
#ifdef NDEBUG
  while (!has_ended(barrier, parity)) {
  }
#else
  for (int tries = 0; !has_ended(barrier, parity); ++tries)
    if (tries > 1 << 22) __trap();
#endif
}

// --- bulk tensor copies ---

// A box of a tensor [rows, heads, columns]; rows and columns past its end arrive as zeros, and count as bytes.
__device__ inline void load_box(unsigned to, const CUtensorMap& map, unsigned barrier, int column, int head, int row) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5}], "
      "[%2];\n" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(head), "r"(row)
      : "memory");
}
// The same of what is read once, or seldom: it leaves the L2 cache before all else.
__device__ inline void load_box_once(unsigned to, const CUtensorMap& map, unsigned barrier, int column, int head,
                                     int row) {
  constexpr std::uint64_t kEvictFirst = 0x12F0000000000000;
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3,%4,%5}], [%2], %6;\n" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(head), "r"(row), "l"(kEvictFirst)
      : "memory");
}
// Bytes that follow each other, a multiple of 16 at a multiple of 16.
__device__ inline void load_bytes(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// The same into the L2 cache only, of global memory.
__device__ inline void prefetch_bytes(const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(from), "r"(bytes) : "memory");
}
// A box into the L2 cache only.
__device__ inline void prefetch_box(const CUtensorMap& map, int column, int head, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1,%2,%3}];\n" ::"l"(&map), "r"(column),
               "r"(head), "r"(row)
               : "memory");
}
__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(&map) : "memory");
}
// Added to two floats at a multiple of 8 bytes, without waiting for them.
__device__ inline void add_two(float* to, float x, float y) {
  asm volatile("red.global.add.v2.f32 [%0], {%1,%2};\n" ::"l"(to), "f"(x), "f"(y) : "memory");
}
// Floats of shared memory added to those of global memory, a multiple of 16 bytes; one group of such is under way.
__device__ inline void add_bytes(float* to, unsigned from, unsigned bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\ncp.async.bulk.commit_group;\n" ::"l"(
          to),
      "r"(from), "r"(bytes)
      : "memory");
}
// They have been read; they have been added.
__device__ inline void await_read() { asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory"); }
__device__ inline void await_added() { asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory"); }
// A number that says what another block may go on with. Bulk copies on both sides of it are ordered by the fences.
__device__ inline void publish(int* to, int x) {
  asm volatile("fence.proxy.async.global;\nst.release.gpu.global.s32 [%0], %1;\n" ::"l"(to), "r"(x) : "memory");
}
__device__ inline void await_number(const int* from, int x) {
  int now;
  for (int tries = 0;; ++tries) {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(now) : "l"(from) : "memory");
    if (now == x) break;
#ifndef NDEBUG
    if (tries > 1 << 22) __trap();
#endif
  }
  asm volatile("fence.proxy.async.global;\n" ::: "memory");
}
// Ordinary stores to shared memory before, products or bulk copies of it after: every writer, then a barrier.
__device__ inline void stores_visible() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit numbers, spread over the lanes as sums are; lane l has the address of row l % 8 of
// matrix l / 8.
__device__ inline void store_matrices(unsigned to, const unsigned (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(to), "r"(m[0]), "r"(m[1]),
               "r"(m[2]), "r"(m[3])
               : "memory");
}

// --- the kernel before and the kernel after, where they are launched early (cuda::Shape) ---

// All of the kernel before is done, and seen.
__device__ inline void await_before() { asm volatile("griddepcontrol.wait;\n" ::: "memory"); }
// The kernel after may begin when every block has said this or has ended.
__device__ inline void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory"); }

// --- registers and named barriers ---

template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
__device__ inline void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace weft::cuda::sm90
