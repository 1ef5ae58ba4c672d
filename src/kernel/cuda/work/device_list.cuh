// What the makers of lists on the device share: heads, costs and memory.
#pragma once

#include "kernel/cuda/work/list.h"
#include "plan/cuda/device_plan_data.h"

namespace weft::cuda {

inline constexpr int kListThreads = 128, kListWarps = kListThreads / 32, kCosts = 256;
inline constexpr int kTop = 0x7fffffff;
inline constexpr unsigned kAllLanes = ~0u;

struct ListState {
  unsigned long long entries;  // entries claimed so far
  unsigned done;               // tiles done
};

// The map is a kernel parameter, because a captured copy would read host memory that is gone at replay.
struct HeadJob {
  static constexpr int kMostMapped = 1024, kMostKeyHeads = 1 << 16;

  int heads_q, heads_k;
  bool mapped;
  std::uint16_t map[kMostMapped];
  int *kv_head, *begin, *heads;

  __device__ int kv(int h) const { return mapped ? map[h] : h / (heads_q / heads_k); }
};

// By one block of kListThreads.
__device__ inline void write_heads(const HeadJob& job) {
  for (int h = threadIdx.x; h < job.heads_q; h += kListThreads) {
    const int own = job.kv(h);
    int at = job.mapped ? 0 : h;
    for (int other = 0; job.mapped && other < job.heads_q; ++other)
      at += job.kv(other) < own || (job.kv(other) == own && other < h);
    job.kv_head[h] = own;
    job.heads[at] = h;
  }
  for (int k = threadIdx.x; k <= job.heads_k; k += kListThreads) {
    int before = job.mapped ? 0 : k * (job.heads_q / job.heads_k);
    for (int h = 0; job.mapped && h < job.heads_q; ++h) before += job.kv(h) < k;
    job.begin[k] = before;
  }
}

// Cost in quarters of powers of two: 0 for nothing, otherwise 1 + 4·log2, so that 63 bits fit into 253 levels.
__device__ inline std::uint8_t cost_of(unsigned long long work) {
  if (work == 0) return 0;
  const int top = 63 - __clzll(static_cast<long long>(work));
  const int quarter = static_cast<int>(top >= 2 ? work >> (top - 2) & 3 : work << (2 - top) & 3);
  return static_cast<std::uint8_t>(1 + 4 * top + quarter);
}

// Allocates arrays within one buffer, each aligned to 16 bytes. With a null base it only counts.
class Room {
 public:
  explicit Room(int* base) : base_(base) {}
  template <class T>
  T* take(Index count) {
    T* const at = reinterpret_cast<T*>(base_ == nullptr ? nullptr : base_ + used_);
    used_ += ceil_div(count * static_cast<Index>(sizeof(T)), 16) * 4;
    return at;
  }
  std::size_t used() const { return static_cast<std::size_t>(used_); }

 private:
  int* base_;
  Index used_ = 0;
};

// The rest of a HeadJob, with room for what it writes.
void place_heads(HeadJob& job, const HeadGroups& heads, Room& room);
// Error if the lists cannot be made.
void check_sizes(const detail::DevicePlanData& plan, std::span<const Tiling> tilings, const HeadGroups& heads);

}  // namespace weft::cuda
