// Products by warpgroups. A tile in shared memory is boxes of 64 columns (128 bytes), [rows] each, permuted as the bulk
// tensor copy does it: the 16-byte pieces of a row by row % 8. Boxes begin at multiples of 1,024 bytes.
//
// Sums: thread t of the group has rows 16·(t / 32) + t % 32 / 4 (+ 8), of number i: row + 8·(i / 2 % 2), column
// 8·(i / 4) + 2·(t % 4) + i % 2. A left operand of registers has for each 16 columns the four pairs
// {row, col}, {row + 8, col}, {row, col + 8}, {row + 8, col + 8}: what the same thread has of a sum, rounded.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace weft::cuda::sm90 {

// Where a tile lies, for a product that reads it: the lower half of a descriptor. kBoxes: bytes between boxes, which
// matter only to a right operand that is read by columns. The upper half is the same for all: 1,024 bytes between eight
// rows, and the permutation.
template <unsigned kBoxes = 16>
__device__ inline unsigned tile_at(unsigned address) {
  return ((kBoxes >> 4) & 0x3fff) << 16 | (address & 0x3ffff) >> 4;
}
// The same tile further on.
__device__ inline unsigned moved(unsigned tile, unsigned bytes) { return tile + (bytes >> 4); }
#define WEFT_UPPER "0x40000040"

// Before the first product that reads registers written since the last.
__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
// All but the last kPending groups have ended.
template <int kPending>
__device__ inline void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// Operands of the instructions, by macros: their number cannot be a template's.
#define WEFT_F8(d, i)                                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define WEFT_F16(d, i) WEFT_F8(d, i), WEFT_F8(d, i + 8)
#define WEFT_F32(d, i) WEFT_F8(d, i), WEFT_F8(d, i + 8), WEFT_F8(d, i + 16), WEFT_F8(d, i + 24)
#define WEFT_F64(d, i) WEFT_F32(d, i), WEFT_F32(d, i + 32)
#define WEFT_HALF_N0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WEFT_N0                                                                                                    \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
  "%30,%31"
#define WEFT_N32                                                                                                  \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58," \
  "%59,%60,%61,%62,%63"
#define WEFT_HALF_N64                                                                                             \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90," \
  "%91,%92,%93,%94,%95"
#define WEFT_N64                                                                                                  \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90," \
  "%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,"    \
  "%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// Both operands in shared memory, [m][k] and [n][k]. The sums come last: they hold commas.
#define WEFT_PRODUCT_SS(...) WEFT_PRODUCT_SHARED("0, 0", __VA_ARGS__)
// Both in shared memory by columns: [k][m], of 64 m, and [k][n].
#define WEFT_PRODUCT_CC(...) WEFT_PRODUCT_SHARED("1, 1", __VA_ARGS__)
// The left one [m][k], the right one by columns: [k][n].
#define WEFT_PRODUCT_SC(...) WEFT_PRODUCT_SHARED("0, 1", __VA_ARGS__)
#define WEFT_PRODUCT_SHARED(BY, N, TYPE, NUMBERS, A, B, P, ...)                                                        \
  asm volatile("{\n.reg .pred p;\n.reg .b64 left, right;\nsetp.ne.b32 p, " P ", 0;\nmov.b64 left, {" A ", " WEFT_UPPER \
               "};\nmov.b64 right, {" B ", " WEFT_UPPER "};\nwgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE      \
               "." TYPE " {" NUMBERS "}, left, right, p, 1, 1, " BY ";\n}\n"                                           \
               : __VA_ARGS__                                                                                           \
               : "r"(a), "r"(b), "r"(static_cast<int>(add)))
// Left operand in registers; the right one is [k][n].
#define WEFT_PRODUCT_RS(N, TYPE, NUMBERS, A, B, P, ...)                                                           \
  asm volatile("{\n.reg .pred p;\n.reg .b64 right;\nsetp.ne.b32 p, " P ", 0;\nmov.b64 right, {" B ", " WEFT_UPPER \
               "};\nwgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" NUMBERS "}, {" A           \
               "}, right, p, 1, 1, 1;\n}\n"                                                                       \
               : __VA_ARGS__                                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(static_cast<int>(add)))
#define WEFT_PRODUCT(OPERANDS, N, NUMBERS, A, B, P, ...)               \
  if constexpr (kBf16)                                                 \
    WEFT_PRODUCT_##OPERANDS(N, "bf16", NUMBERS, A, B, P, __VA_ARGS__); \
  else                                                                 \
    WEFT_PRODUCT_##OPERANDS(N, "f16", NUMBERS, A, B, P, __VA_ARGS__)

// sums[64 x n] = (add ? sums : 0) + a·b, 16 deep.
template <bool kBf16>
__device__ inline void product(float (&d)[16], unsigned a, unsigned b, bool add) {
  WEFT_PRODUCT(SS, "32", WEFT_HALF_N0, "%16", "%17", "%18", WEFT_F16(d, 0));
}
template <bool kBf16>
__device__ inline void product(float (&d)[32], unsigned a, unsigned b, bool add) {
  WEFT_PRODUCT(SS, "64", WEFT_N0, "%32", "%33", "%34", WEFT_F32(d, 0));
}
template <bool kBf16>
__device__ inline void product(float (&d)[64], unsigned a, unsigned b, bool add) {
  WEFT_PRODUCT(SS, "128", WEFT_N0 WEFT_N32, "%64", "%65", "%66", WEFT_F64(d, 0));
}
template <bool kBf16>
__device__ inline void product(float (&d)[32], const unsigned (&a)[4], unsigned b, bool add) {
  WEFT_PRODUCT(RS, "64", WEFT_N0, "%32,%33,%34,%35", "%36", "%37", WEFT_F32(d, 0));
}
template <bool kBf16>
__device__ inline void product(float (&d)[64], const unsigned (&a)[4], unsigned b, bool add) {
  WEFT_PRODUCT(RS, "128", WEFT_N0 WEFT_N32, "%64,%65,%66,%67", "%68", "%69", WEFT_F64(d, 0));
}
template <bool kBf16>
__device__ inline void product(float (&d)[96], const unsigned (&a)[4], unsigned b, bool add) {
  WEFT_PRODUCT(RS, "192", WEFT_N0 WEFT_N32 WEFT_HALF_N64, "%96,%97,%98,%99", "%100", "%101", WEFT_F64(d, 0),
               WEFT_F32(d, 64));
}
template <bool kBf16>
__device__ inline void product(float (&d)[128], const unsigned (&a)[4], unsigned b, bool add) {
  WEFT_PRODUCT(RS, "256", WEFT_N0 WEFT_N32 WEFT_N64, "%128,%129,%130,%131", "%132", "%133", WEFT_F64(d, 0),
               WEFT_F64(d, 64));
}

// The same of operands that lie by columns.
template <bool kBf16>
__device__ inline void product_columns(float (&d)[32], unsigned a, unsigned b, bool add) {
  WEFT_PRODUCT(CC, "64", WEFT_N0, "%32", "%33", "%34", WEFT_F32(d, 0));
}
template <bool kBf16>
__device__ inline void product_columns(float (&d)[64], unsigned a, unsigned b, bool add) {
  WEFT_PRODUCT(CC, "128", WEFT_N0 WEFT_N32, "%64", "%65", "%66", WEFT_F64(d, 0));
}

// The same of a right operand alone that lies by columns.
template <bool kBf16>
__device__ inline void product_right_columns(float (&d)[32], unsigned a, unsigned b, bool add) {
  WEFT_PRODUCT(SC, "64", WEFT_N0, "%32", "%33", "%34", WEFT_F32(d, 0));
}
template <bool kBf16>
__device__ inline void product_right_columns(float (&d)[64], unsigned a, unsigned b, bool add) {
  WEFT_PRODUCT(SC, "128", WEFT_N0 WEFT_N32, "%64", "%65", "%66", WEFT_F64(d, 0));
}

#undef WEFT_UPPER
#undef WEFT_PRODUCT
#undef WEFT_PRODUCT_SS
#undef WEFT_PRODUCT_CC
#undef WEFT_PRODUCT_SC
#undef WEFT_PRODUCT_SHARED
#undef WEFT_PRODUCT_RS
#undef WEFT_F8
#undef WEFT_F16
#undef WEFT_F32
#undef WEFT_F64
#undef WEFT_HALF_N0
#undef WEFT_N0
#undef WEFT_N32
#undef WEFT_HALF_N64
#undef WEFT_N64

}  // namespace weft::cuda::sm90
