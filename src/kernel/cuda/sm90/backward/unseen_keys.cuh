// Zeros in dK and dV of keys in no slice, written by the idle producer warps while the consumers compute.
#pragma once

#include "kernel/cuda/rows.cuh"
#include "kernel/cuda/sm90/backward/params.h"

namespace weft::cuda::sm90 {

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

// kKeys: keys of a tile.
template <int kKeys>
__device__ void zero_fill_unseen(const BackwardParams& params) {
#pragma unroll 1
  for (int n = static_cast<int>(blockIdx.x); n < params.unseen_tiles * params.heads_k;
       n += static_cast<int>(gridDim.x)) {
    const int tile = n % params.unseen_tiles, head = n / params.unseen_tiles;
    int2 keys = {tile * kKeys, min((tile + 1) * kKeys, params.k_rows)};
    if (params.unseen != nullptr) {
      keys = params.unseen[tile];
    } else {
      const int2 slices = params.keys.list.ranges[tile];
      if (slices.x < slices.y) continue;
    }
    zero_fill_keys(params.dk, params.vec8_dk ? 2 : 4, keys, head);
    zero_fill_keys(params.dv, params.vec8_dv ? 2 : 4, keys, head);
  }
}

}  // namespace weft::cuda::sm90
