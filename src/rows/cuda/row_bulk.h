// Copies rows between tensors by a map, through shared memory with cp.async.bulk (compute capability 9.0).
//
// A block is one warp with a few KiB: each lane finds a row, loads it, and stores it when it has landed. Nothing is
// held in registers and blocks are short, so that faster SMs take more of them.
#pragma once

#include "rows/cuda/row_copy.h"

namespace weft {

namespace bulk {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ inline unsigned address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// The mbarrier completes when one thread has arrived and the expected bytes have landed.
__device__ inline void mbarrier_init(unsigned barrier) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n"
      "fence.proxy.async.shared::cta;\n" ::"r"(barrier)
      : "memory");
}
__device__ inline void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void mbarrier_wait(unsigned barrier) {
  unsigned done = 0;
  while (done == 0)
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier)
        : "memory");
}

__device__ inline void load(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ inline void store(void* to, unsigned from, unsigned bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;\n" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}
// Shared memory must stay valid until then.
__device__ inline void wait_group_read() { asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory"); }

#endif

}  // namespace bulk

struct BulkCopy {
  // Shorter rows are too many copies: at 128 bytes each they take longer than through registers.
  static constexpr Index kMinBytes = 256;
  static constexpr Index kTileBytes = 4096;
  // 20 blocks on an SM with 228 KiB, each of which takes 1 KiB more than it asks for: 80 KiB of rows in flight. With
  // less, too little is in flight while other blocks still search for their rows; with more, the accesses are so
  // scattered that memory gets slower.
  static constexpr std::size_t kSharedBytes = 10240;
};

template <class Map>
__global__ void __launch_bounds__(32)
    copy_rows_in_bulk(const __grid_constant__ RowCopy copy, const __grid_constant__ Map map) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char tile[];
  __shared__ unsigned long long mbarrier;
  const unsigned lane = threadIdx.x, task = blockIdx.x, barrier = bulk::address(&mbarrier);
  if (lane == 0) bulk::mbarrier_init(barrier);
  const RowOffsets at = find_row(copy, map, map.known(), task, lane);
  const unsigned width = copy.width.divisor, units = static_cast<unsigned>(copy.units);
  const unsigned skipped = copy.parts == 1 ? 0 : task % static_cast<unsigned>(copy.parts) * width;
  const unsigned bytes = 16 * min(width, units - skipped), mine = bulk::address(tile) + lane * bytes;
  char* const to = copy.to.data + at.to + 16ull * skipped;
  const bool moves = at.from != RowOffsets::kNothing && at.from != RowOffsets::kZeros;
  const unsigned moving = __ballot_sync(~0u, moves), zeros = __ballot_sync(~0u, at.from == RowOffsets::kZeros);
  if (lane == 0) bulk::mbarrier_arrive_expect_tx(barrier, static_cast<unsigned>(__popc(moving)) * bytes);
  __syncwarp();
  if (moves) bulk::load(mine, copy.from.data + at.from + 16ull * skipped, bytes, barrier);
  // While the rows are in flight.
  for (unsigned left = zeros; left != 0; left &= left - 1) {
    auto* const row = reinterpret_cast<char*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(to), __ffs(static_cast<int>(left)) - 1));
    for (unsigned i = 16 * lane; i < bytes; i += 16 * 32) *reinterpret_cast<uint4*>(row + i) = uint4{};
  }
  map.check(copy.reporter);
  bulk::mbarrier_wait(barrier);
  if (moves) bulk::store(to, mine, bytes);
  bulk::wait_group_read();
#endif
}

}  // namespace weft
