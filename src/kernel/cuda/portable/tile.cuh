// Tiles in shared memory, and mma.sync on them.
//
// A tile is [rows][kColumns] of 16-bit elements, kColumns a multiple of 64, with one such plane for each part of an
// f32. An ldmatrix reads the same 16 bytes of eight rows, so the 16-byte pieces of each 128 bytes are swizzled by row %
// 8 to lie in different banks. Bases are aligned to 128 bytes.
#pragma once

#include "kernel/cuda/portable/operand_types.cuh"
#include "weft/tensor.h"

namespace weft::cuda {

__device__ inline unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// Byte offset of (row, 16-byte piece).
template <int kColumns>
__device__ inline unsigned swizzled_offset(int row, int piece) {
  return static_cast<unsigned>(row * kColumns * 2 + ((piece ^ (row & 7)) << 4));
}

// How load_tile (rows.cuh) lays out a tile.
template <int kColumns>
struct SwizzledRows {
  __device__ static unsigned offset(int row, int piece) { return swizzled_offset<kColumns>(row, piece); }
};

__device__ inline void ldmatrix_x4(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}
__device__ inline void ldmatrix_x4_trans(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}

__device__ inline void store_byte(unsigned to, bool x) {
  asm volatile("st.shared.u8 [%0], %1;\n" ::"r"(to), "r"(x ? 1 : 0) : "memory");
}
__device__ inline bool load_byte(unsigned from) {
  unsigned x;
  asm volatile("ld.shared.u8 %0, [%1];\n" : "=r"(x) : "r"(from));
  return x != 0;
}

__device__ inline void store_float(unsigned to, float x) {
  asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(to), "f"(x) : "memory");
}
__device__ inline float load_float(unsigned from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(x) : "r"(from) : "memory");
  return x;
}

__device__ inline void cp_async_16(unsigned to, const void* from, bool zero) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(zero ? 0 : 16) : "memory");
}
__device__ inline void cp_async_8(unsigned to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;\n" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void cp_async_wait_all() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }

// Addresses of 16 x 16 blocks of a tile for ldmatrix: a lane's row is lane % 16, its piece lane / 16. Blocks are 16
// rows and two pieces apart; the swizzle is an exclusive or, so moving by two pieces is one too.
template <int kRows, int kColumns>
struct Blocks {
  static constexpr unsigned kPlane = kRows * kColumns * 2;
  unsigned lane;

  __device__ Blocks(unsigned base, int first_row)
      : lane(base + swizzled_offset<kColumns>(first_row + (threadIdx.x & 15), (threadIdx.x & 31) >> 4)) {}
  __device__ unsigned address(int part, int row, int pair) const {
    return (lane ^ static_cast<unsigned>((pair & 3) << 5)) +
           (static_cast<unsigned>(part) * kPlane + static_cast<unsigned>(row * 16 * kColumns * 2 + (pair >> 2) * 128));
  }
};

// A operands [m][k]: load(to, part, m, k) of 16 x 16.
template <class B>
struct LeftRows {  // stored as [m][k]
  B at;
  __device__ void load(unsigned (&to)[4], int part, int m, int k) const { ldmatrix_x4(to, at.address(part, m, k)); }
};
template <class B>
struct LeftColumns {  // stored as [k][m]
  B at;
  int first = 0;  // block of columns
  __device__ void load(unsigned (&to)[4], int part, int m, int k) const {
    unsigned r[4];
    ldmatrix_x4_trans(r, at.address(part, k, first + m));
    to[0] = r[0];
    to[1] = r[2];
    to[2] = r[1];
    to[3] = r[3];
  }
};
// B operands [k][n]: load(to, part, n, k) of 16 x 16, the first 8 columns in to[0], to[1].
template <class B>
struct RightRows {  // stored as [n][k]
  B at;
  __device__ void load(unsigned (&to)[4], int part, int n, int k) const {
    unsigned r[4];
    ldmatrix_x4(r, at.address(part, n, k));
    to[0] = r[0];
    to[1] = r[2];
    to[2] = r[1];
    to[3] = r[3];
  }
};
template <class B>
struct RightColumns {  // stored as [k][n]
  B at;
  int first = 0;  // block of columns
  __device__ void load(unsigned (&to)[4], int part, int n, int k) const {
    ldmatrix_x4_trans(to, at.address(part, k, first + n));
  }
};

// sums[m][n8] += left·right over kSteps of k = 16. Lane l has rows l / 4 and l / 4 + 8 and columns 2·(l % 4) and the
// next of an accumulator: {row, col}, {row, col + 1}, {row + 8, col}, {row + 8, col + 1}.
template <class N, int kSteps, int kM, int kN8, class Left, class Right>
__device__ inline void mma_tiles(float (&sums)[kM][kN8][4], const Left& left, const Right& right) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    unsigned a[kM][N::kParts][4];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int part = 0; part < N::kParts; ++part) left.load(a[m][part], part, m, k);
#pragma unroll
    for (int n = 0; n < kN8 / 2; ++n) {
      unsigned low[N::kParts][2], high[N::kParts][2];
#pragma unroll
      for (int part = 0; part < N::kParts; ++part) {
        unsigned b[4];
        right.load(b, part, n, k);
        low[part][0] = b[0];
        low[part][1] = b[1];
        high[part][0] = b[2];
        high[part][1] = b[3];
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        N::mma(sums[m][2 * n], a[m], low);
        N::mma(sums[m][2 * n + 1], a[m], high);
      }
    }
  }
}

// The same with accumulators [m][16·k columns] as the A operand: a thread's accumulators, rounded, are its part of the
// operand.
template <class N, int kM, int kK8, int kN8, class Right>
__device__ inline void mma_fragments(float (&sums)[kM][kN8][4], const float (&left)[kM][kK8][4], const Right& right) {
#pragma unroll
  for (int k = 0; k < kK8 / 2; ++k) {
    unsigned a[kM][N::kParts][4];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* from = left[m][2 * k + i / 2];
        unsigned packed[N::kParts];
        N::pack(packed, from[2 * (i % 2)], from[2 * (i % 2) + 1]);
#pragma unroll
        for (int part = 0; part < N::kParts; ++part) a[m][part][i] = packed[part];
      }
#pragma unroll
    for (int n = 0; n < kN8 / 2; ++n) {
      unsigned low[N::kParts][2], high[N::kParts][2];
#pragma unroll
      for (int part = 0; part < N::kParts; ++part) {
        unsigned b[4];
        right.load(b, part, n, k);
        low[part][0] = b[0];
        low[part][1] = b[1];
        high[part][0] = b[2];
        high[part][1] = b[3];
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        N::mma(sums[m][2 * n], a[m], low);
        N::mma(sums[m][2 * n + 1], a[m], high);
      }
    }
  }
}

// A warp's accumulators, rounded, to a tile [kRows][kColumns] in shared memory: rows from `row` on, 16-byte pieces from
// `piece` on.
template <class N, int kRows, int kColumns, int kM, int kN8>
__device__ inline void store_packed(unsigned to, int row, int piece, const float (&x)[kM][kN8][4]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unsigned packed[N::kParts];
        N::pack(packed, x[m][n][2 * i], x[m][n][2 * i + 1]);
        const unsigned at = to + swizzled_offset<kColumns>(row + 16 * m + lane / 4 + 8 * i, piece + n) + 4 * (lane % 4);
#pragma unroll
        for (int part = 0; part < N::kParts; ++part)
          asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(at + static_cast<unsigned>(part * kRows * kColumns * 2)),
                       "r"(packed[part])
                       : "memory");
      }
}

template <int kM, int kN8>
__device__ inline void clear(float (&sums)[kM][kN8][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] = 0;
}

template <class Operand>
struct Later {  // from k on
  const Operand& operand;
  int k;
  __device__ void load(unsigned (&to)[4], int part, int m, int step) const { operand.load(to, part, m, k + step); }
};
// sums = left·right of few columns: two chains of products, since one alone would wait for each product to end.
template <class N, int kSteps, int kM, int kN8, class Left, class Right>
__device__ inline void mma_in_two_chains(float (&sums)[kM][kN8][4], const Left& left, const Right& right) {
  static_assert(kSteps % 2 == 0);
  float odd[kM][kN8][4];
  clear(sums);
  clear(odd);
#pragma unroll
  for (int k = 0; k < kSteps; k += 2) {
    mma_tiles<N, 1>(sums, Later<Left>{left, k}, Later<Right>{right, k});
    mma_tiles<N, 1>(odd, Later<Left>{left, k + 1}, Later<Right>{right, k + 1});
  }
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] += odd[m][n][i];
}

// 2^x, exactly 1 at 0 and 0 at -inf; the error is at most 2^-22.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
// NaN if either is NaN, because a NaN among logits must not be hidden.
__device__ inline float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

}  // namespace weft::cuda
