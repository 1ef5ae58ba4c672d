// Adds up the parts of dK and dV of tiles of keys that several items computed.
#include "cuda/launch.h"
#include "kernel/cuda/rows.cuh"
#include "kernel/cuda/sm90/backward/params.h"

namespace weft::cuda::sm90 {
namespace {

constexpr int kSumThreads = 256;

// One block for 64 keys of a tile and K/V head. Parts are in register layout: 128 lanes of float4, for each 8 columns.
// `columns`: those of a part, a multiple of 8.
__device__ void sum_tile(const PartSums& params, const float* parts, int columns, const TensorView& to) {
  const int groups = params.keys / 64, group = static_cast<int>(blockIdx.x) % groups;
  const SplitTile tile = params.tiles[static_cast<int>(blockIdx.x) / groups];
  const int head = static_cast<int>(blockIdx.y), heads = static_cast<int>(gridDim.y);
  const Index part_size = static_cast<Index>(columns) * params.keys;  // floats of one head
  const float* first = parts + (static_cast<Index>(tile.first_part) * heads + head) * part_size + 64 * columns * group;
  for (int e = static_cast<int>(threadIdx.x); e < 16 * columns; e += kSumThreads) {
    float4 sum = {0, 0, 0, 0};
    for (int p = 0; p < tile.parts; ++p) {
      const float4 x = __ldcs(reinterpret_cast<const float4*>(first + p * heads * part_size) + e);
      sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    }
    const int lane = e % 32, key = tile.begin + 64 * group + e / 32 % 4 * 16 + lane / 4,
              column = e / 128 * 8 + lane % 4 * 2;
    if (key < tile.end) RowOut(to, key, head).store(column, sum.x, sum.y);
    if (key + 8 < tile.end) RowOut(to, key + 8, head).store(column, sum.z, sum.w);
  }
}

__global__ void __launch_bounds__(kSumThreads) sum_kernel(const __grid_constant__ PartSums params) {
  sum_tile(params, params.dk_parts, params.columns_k, params.dk);
  sum_tile(params, params.dv_parts, params.columns_v, params.dv);
}

}  // namespace

void sum_parts(const PartSums& params, int heads_k, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(params.count * (params.keys / 64));
  launch(&sum_kernel, {dim3(blocks, static_cast<unsigned>(heads_k)), dim3(kSumThreads), 0}, stream, params);
}

}  // namespace weft::cuda::sm90
