// Zeros in dK and dV of keys that no slice shows: by the warps beside the one that fetches, while the others multiply.
#pragma once

#include "kernel/cuda/rows.cuh"
#include "kernel/cuda/sm90/backward/call.h"

namespace weft::cuda::sm90 {

// Threads 32 .. 127 of a block, 16 a row. Nothing is unrolled: they have few registers.
__device__ inline void clear_keys(const TensorView& to, int element_bytes, int2 keys, int head) {
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

// kKeys: of a tile.
template <int kKeys>
__device__ void clear_unseen(const BackwardCall& call) {
#pragma unroll 1
  for (int n = static_cast<int>(blockIdx.x); n < call.unseen_tiles * call.heads_k; n += static_cast<int>(gridDim.x)) {
    const int tile = n % call.unseen_tiles, head = n / call.unseen_tiles;
    int2 keys = {tile * kKeys, min((tile + 1) * kKeys, call.k_rows)};
    if (call.unseen != nullptr) {
      keys = call.unseen[tile];
    } else {
      const int2 slices = call.keys.list.ranges[tile];
      if (slices.x < slices.y) continue;
    }
    clear_keys(call.dk, call.wide_dk ? 2 : 4, keys, head);
    clear_keys(call.dv, call.wide_dv ? 2 : 4, keys, head);
  }
}

}  // namespace weft::cuda::sm90
