// Copies rows between tensors by a map, through registers: any row size, any alignment, any GPU.
//
// A warp takes K neighbouring rows of the launch, or a part of a long one. Its lanes find K pairs of rows, leave their
// byte offsets in shared memory, and then all lanes copy units of up to 16 bytes, several of them in flight at a time.
// There is no barrier between warps. Few bytes per warp and many warps make all SMs finish at about the same time.
#pragma once

#include "rows/cuda/row_map.h"
#include "weft/layout.h"

namespace weft {

// A RowTensor with its defaults filled in.
struct RowsView {
  char* data;
  Index rows, row_stride, inner, outer_stride;

  explicit RowsView(const RowTensor& t)
      : data(static_cast<char*>(t.data)),
        rows(t.rows),
        row_stride(t.row_stride == 0 ? t.row_bytes : t.row_stride),
        inner(t.inner),
        outer_stride(t.outer_stride) {}
  __device__ Index offset(int row) const {
    if (inner == 0) return row * row_stride;
    const int i = static_cast<int>(inner);
    return row / i * outer_stride + row % i * row_stride;
  }
};

struct RowCopy {
  static constexpr int kThreads = 256;
  static constexpr int kBatch = 4, kBlocks = 5;  // units in flight per lane; blocks per SM
  static constexpr Index kBytesPerWarp = 2048;   // 32 lanes x kBatch x 16

  RowsView from, to;
  int rows;           // rows of the launch
  int rows_per_warp;  // K, at most 32
  int units;          // units of a row
  int parts;          // into which long rows are cut
  unsigned tasks;     // groups of rows, or parts of a row
  FastDivisor width;  // units of a part
  Reporter reporter;
};

// What is done with a unit.
struct Replace {
  template <class Unit>
  __device__ static Unit load(const Unit* from) {
    return *from;
  }
  template <class Unit>
  __device__ static void store(Unit* to, Unit from) {
    *to = from;
  }
};

struct AddF32 {
  template <class Unit>
  __device__ static Unit load(const Unit* from) {
    return *from;
  }
  __device__ static unsigned add(unsigned a, unsigned b) {
    return __float_as_uint(__uint_as_float(a) + __uint_as_float(b));
  }
  __device__ static void store(unsigned* to, unsigned from) { *to = add(*to, from); }
  __device__ static void store(uint2* to, uint2 from) {
    const uint2 old = *to;
    *to = {add(old.x, from.x), add(old.y, from.y)};
  }
  __device__ static void store(uint4* to, uint4 from) {
    const uint4 old = *to;
    *to = {add(old.x, from.x), add(old.y, from.y), add(old.z, from.z), add(old.w, from.w)};
  }
};

// Byte offsets of a row.
struct RowOffsets {
  static constexpr long long kNothing = -1, kZeros = -2;  // values of `from`

  long long from, to;
};

template <class Map>
__device__ RowOffsets find_row(const RowCopy& copy, const Map& map, const typename Map::Known& known, unsigned task,
                               unsigned lane) {
  const unsigned group = copy.parts == 1 ? task : task / static_cast<unsigned>(copy.parts);
  const Index first = static_cast<Index>(group) * copy.rows_per_warp;
  const Index last = min_of(first + copy.rows_per_warp, copy.rows) - 1;
  // The whole warp must take part: lanes without a row use the last one.
  const RowPair pair = map.at(known, static_cast<int>(min_of(first + lane, last)));
  if (first + lane > last || pair.to < 0 || pair.to >= copy.to.rows || pair.from >= copy.from.rows)
    return {RowOffsets::kNothing, 0};
  const long long to = copy.to.offset(pair.to);
  if (pair.from == RowPair::kZeros) return {RowOffsets::kZeros, to};
  return {pair.from < 0 ? RowOffsets::kNothing : copy.from.offset(pair.from), to};
}

template <class Unit, class Op, class Map>
__global__ void __launch_bounds__(RowCopy::kThreads, RowCopy::kBlocks)
    copy_rows_by(const __grid_constant__ RowCopy copy, const __grid_constant__ Map map) {
  constexpr int kBatch = RowCopy::kBatch;
  constexpr unsigned kWarps = RowCopy::kThreads / 32;
  __shared__ alignas(16) RowOffsets shared[kWarps][32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, task = blockIdx.x * kWarps + warp;
  if (task < copy.tasks) {
    shared[warp][lane] = find_row(copy, map, map.known(), task, lane);
    __syncwarp();
    const RowOffsets* const offsets = shared[warp];
    const unsigned width = copy.width.divisor, units = static_cast<unsigned>(copy.units);
    const unsigned total = static_cast<unsigned>(copy.rows_per_warp) * width;
    const unsigned shift = copy.parts == 1 ? 0 : task % static_cast<unsigned>(copy.parts) * width;
    for (unsigned base = lane; base < total; base += 32 * kBatch) {
      Unit values[kBatch];
      Unit* to[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const unsigned x = base + 32 * j;
        to[j] = nullptr;
        if (x >= total) continue;
        const unsigned row = copy.width.divide(x), unit = shift + x - row * width;
        const RowOffsets at = offsets[row];
        if (at.from == RowOffsets::kNothing || unit >= units) continue;
        to[j] = reinterpret_cast<Unit*>(copy.to.data + at.to) + unit;
        values[j] = at.from == RowOffsets::kZeros
                        ? Unit{}
                        : Op::load(reinterpret_cast<const Unit*>(copy.from.data + at.from) + unit);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (to[j] != nullptr) Op::store(to[j], values[j]);
    }
  }
  map.check(copy.reporter);
}

}  // namespace weft
