// Hopper's PTX instructions other than WGMMA (wgmma.cuh), one thin function each, named after the instruction.
// Addresses of type unsigned are in shared memory.
#pragma once

#include <cstdint>

#include <cuda.h>

namespace weft::cuda::sm90 {

// --- mbarrier: a phase completes when all arrivals and all expected transaction bytes have come ---

__device__ inline void mbarrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals));
}
// After the last mbarrier_init, before __syncthreads.
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory"); }
__device__ inline void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
// Lane 0 arrives for a warp that has read what an mbarrier guards. compute-sanitizer's racecheck does not see that the
// other lanes have read too, so for racecheck each lane arrives (WEFT_EACH_LANE_ARRIVES). Nor does it know that step
// flags read before their mbarrier was tested carry a phase bit, so for racecheck they are read after it.
#ifdef WEFT_EACH_LANE_ARRIVES
inline constexpr int kArrivalsPerWarp = 32;
inline constexpr bool kReadsBeforeBarrier = false;
#else
inline constexpr int kArrivalsPerWarp = 1;
inline constexpr bool kReadsBeforeBarrier = true;
#endif
__device__ __forceinline__ bool lane_arrives() { return kArrivalsPerWarp == 32 || threadIdx.x % 32 == 0; }
// The same by the lane that elect.sync picks, for a converged warp: no branch and no lane number.
__device__ __forceinline__ void mbarrier_arrive_elected(unsigned barrier) {
  if constexpr (kArrivalsPerWarp == 32)
    mbarrier_arrive(barrier);
  else
    asm volatile(
        "{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}\n" ::"r"(barrier)
        : "memory");
}
__device__ inline void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
// Has the phase of this parity completed? A fresh mbarrier is in phase 0: parity 1 has completed, parity 0 has not.
__device__ inline bool mbarrier_try_wait(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}
// The same without suspending the thread.
__device__ inline bool mbarrier_test_wait(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}
// In a debug build an mbarrier that never completes traps instead of hanging the kernel.
__device__ inline void mbarrier_wait(unsigned barrier, unsigned parity) {
#ifdef NDEBUG
  while (!mbarrier_try_wait(barrier, parity)) {
  }
#else
  for (int tries = 0; !mbarrier_try_wait(barrier, parity); ++tries)
    if (tries > 1 << 22) __trap();
#endif
}

// --- TMA and other bulk copies ---

// A box of a tensor [rows, heads, columns]. What lies past its end arrives as zeros, which count as transaction bytes.
__device__ inline void tma_load_3d(unsigned to, const CUtensorMap& map, unsigned barrier, int column, int head,
                                   int row) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5}], "
      "[%2];\n" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(head), "r"(row)
      : "memory");
}
// The same for data that is read once or seldom.
__device__ inline void tma_load_3d_evict_first(unsigned to, const CUtensorMap& map, unsigned barrier, int column,
                                               int head, int row) {
  constexpr std::uint64_t kEvictFirst = 0x12F0000000000000;
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3,%4,%5}], [%2], %6;\n" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(head), "r"(row), "l"(kEvictFirst)
      : "memory");
}
// Contiguous bytes; their number and both addresses are multiples of 16.
__device__ inline void cp_async_bulk(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ inline void cp_async_bulk_prefetch_l2(const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(from), "r"(bytes) : "memory");
}
__device__ inline void tma_prefetch_3d(const CUtensorMap& map, int column, int head, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1,%2,%3}];\n" ::"l"(&map), "r"(column),
               "r"(head), "r"(row)
               : "memory");
}
__device__ inline void prefetch_tensormap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(&map) : "memory");
}
// `to` is a multiple of 8 bytes.
__device__ inline void red_add_v2_f32(float* to, float x, float y) {
  asm volatile("red.global.add.v2.f32 [%0], {%1,%2};\n" ::"l"(to), "f"(x), "f"(y) : "memory");
}
// Adds floats of shared memory to global memory, a multiple of 16 bytes, as a bulk group of its own.
__device__ inline void cp_reduce_async_bulk_add_f32(float* to, unsigned from, unsigned bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\ncp.async.bulk.commit_group;\n" ::"l"(
          to),
      "r"(from), "r"(bytes)
      : "memory");
}
// All bulk groups have read shared memory; all have completed.
__device__ inline void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
}
__device__ inline void cp_async_bulk_wait_group() { asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory"); }
// A flag between blocks. The proxy fences order the bulk copies before the store, and those after the load.
__device__ inline void store_release(int* to, int x) {
  asm volatile("fence.proxy.async.global;\nst.release.gpu.global.s32 [%0], %1;\n" ::"l"(to), "r"(x) : "memory");
}
__device__ inline void wait_until_equal_acquire(const int* from, int x) {
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
// Makes the thread's stores to shared memory visible to WGMMA and TMA: every writer calls it, then a barrier follows.
__device__ inline void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit elements in the accumulators' lane layout; lane l gives the address of row l % 8 of
// matrix l / 8.
__device__ inline void stmatrix_x4(unsigned to, const unsigned (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(to), "r"(m[0]), "r"(m[1]),
               "r"(m[2]), "r"(m[3])
               : "memory");
}

// --- programmatic dependent launch (cuda::Shape::programmatic) ---

// Kernels that use nothing else of sm_90 are compiled for older architectures too, where they are never launched.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// The previous kernel has completed and its writes are visible.
__device__ inline void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;\n" ::: "memory"); }
// The next kernel may start once every block has called this or exited.
__device__ inline void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}
#else
__device__ inline void griddepcontrol_wait() {}
__device__ inline void griddepcontrol_launch_dependents() {}
#endif

// --- register reallocation and named barriers ---

template <int kRegisters>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
__device__ inline void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// The current stage, and the phase bit of its mbarriers, which flips each time the pipeline wraps around.
template <int kStages>
struct PipelineState {
  int index = 0;
  unsigned phase = 0;
  __device__ void advance() {
    if (++index == kStages) {
      index = 0;
      phase ^= 1;
    }
  }
};

__device__ inline int ld_shared_s32(unsigned address) {
  int x;
  asm volatile("ld.shared.s32 %0, [%1];\n" : "=r"(x) : "r"(address));
  return x;
}
__device__ inline void st_shared_s32(unsigned address, int x) {
  asm volatile("st.shared.s32 [%0], %1;\n" ::"r"(address), "r"(x) : "memory");
}
__device__ inline void st_shared_v2_s32(unsigned address, int a, int b) {
  asm volatile("st.shared.v2.s32 [%0], {%1,%2};\n" ::"r"(address), "r"(a), "r"(b) : "memory");
}
__device__ inline int2 ld_shared_v2_s32(unsigned address) {
  int2 x;
  asm volatile("ld.shared.v2.s32 {%0,%1}, [%2];\n" : "=r"(x.x), "=r"(x.y) : "r"(address));
  return x;
}
__device__ inline void st_shared_v4_s32(unsigned address, int a, int b, int c, int d) {
  asm volatile("st.shared.v4.s32 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

}  // namespace weft::cuda::sm90
