// WGMMA: matrix products of warpgroups. A tile in shared memory is a row of boxes of 64 columns (128 bytes), each
// [rows][64] in the 128-byte swizzle that TMA writes: the 16-byte pieces of a row are permuted by row % 8. Boxes begin
// at multiples of 1,024 bytes.
//
// Accumulators: thread t of the warpgroup holds rows 16·(t / 32) + t % 32 / 4 (+ 8); its element i is in row
// + 8·(i / 2 % 2) and column 8·(i / 4) + 2·(t % 4) + i % 2. An A operand in registers has for each 16 columns the four
// pairs {row, col}, {row + 8, col}, {row, col + 8}, {row + 8, col + 8}: the thread's own accumulators, rounded.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace weft::cuda::sm90 {

// The lower half of a shared memory matrix descriptor. kLeadingBytes is the distance between boxes, which matters only
// to an MN-major B operand. The upper half is the same for all: 1,024 bytes between groups of eight rows, and the
// 128-byte swizzle.
template <unsigned kLeadingBytes = 16>
__device__ inline unsigned smem_descriptor(unsigned address) {
  return ((kLeadingBytes >> 4) & 0x3fff) << 16 | (address & 0x3ffff) >> 4;
}
__device__ inline unsigned advance_descriptor(unsigned descriptor, unsigned bytes) { return descriptor + (bytes >> 4); }
#define WEFT_DESCRIPTOR_UPPER "0x40000040"

// Before the first WGMMA that reads registers written since the previous one.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ inline void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
// All but the last kPending groups have completed.
template <int kPending>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// Operand lists are macros because asm constraints cannot be made by a template.
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

// A and B in shared memory, both K-major: [m][k] and [n][k]. The accumulators are the last argument because they hold
// commas.
#define WEFT_WGMMA_SS(...) WEFT_WGMMA_SHARED("0, 0", __VA_ARGS__)
// A and B in shared memory, both MN-major: [k][m] with 64 m, and [k][n].
#define WEFT_WGMMA_CC(...) WEFT_WGMMA_SHARED("1, 1", __VA_ARGS__)
// A K-major, [m][k]; B MN-major, [k][n].
#define WEFT_WGMMA_SC(...) WEFT_WGMMA_SHARED("0, 1", __VA_ARGS__)
#define WEFT_WGMMA_SHARED(MAJOR, N, TYPE, REGISTERS, A, B, P, ...)                                          \
  asm volatile("{\n.reg .pred p;\n.reg .b64 desc_a, desc_b;\nsetp.ne.b32 p, " P ", 0;\nmov.b64 desc_a, {" A \
               ", " WEFT_DESCRIPTOR_UPPER "};\nmov.b64 desc_b, {" B ", " WEFT_DESCRIPTOR_UPPER              \
               "};\nwgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" REGISTERS            \
               "}, desc_a, desc_b, p, 1, 1, " MAJOR ";\n}\n"                                                \
               : __VA_ARGS__                                                                                \
               : "r"(a), "r"(b), "r"(static_cast<int>(add)))
// A in registers; B MN-major in shared memory, [k][n].
#define WEFT_WGMMA_RS(N, TYPE, REGISTERS, A, B, P, ...)                                                      \
  asm volatile("{\n.reg .pred p;\n.reg .b64 desc_b;\nsetp.ne.b32 p, " P ", 0;\nmov.b64 desc_b, {" B          \
               ", " WEFT_DESCRIPTOR_UPPER "};\nwgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE \
               " {" REGISTERS "}, {" A "}, desc_b, p, 1, 1, 1;\n}\n"                                         \
               : __VA_ARGS__                                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(static_cast<int>(add)))
#define WEFT_WGMMA(OPERANDS, N, REGISTERS, A, B, P, ...)               \
  if constexpr (kBf16)                                                 \
    WEFT_WGMMA_##OPERANDS(N, "bf16", REGISTERS, A, B, P, __VA_ARGS__); \
  else                                                                 \
    WEFT_WGMMA_##OPERANDS(N, "f16", REGISTERS, A, B, P, __VA_ARGS__)

// d[64 x n] = (add ? d : 0) + a·b over k = 16, for A and B K-major, or A in registers and B MN-major.
template <bool kBf16>
__device__ inline void wgmma(float (&d)[16], unsigned a, unsigned b, bool add) {
  WEFT_WGMMA(SS, "32", WEFT_HALF_N0, "%16", "%17", "%18", WEFT_F16(d, 0));
}
template <bool kBf16>
__device__ inline void wgmma(float (&d)[32], unsigned a, unsigned b, bool add) {
  WEFT_WGMMA(SS, "64", WEFT_N0, "%32", "%33", "%34", WEFT_F32(d, 0));
}
template <bool kBf16>
__device__ inline void wgmma(float (&d)[64], unsigned a, unsigned b, bool add) {
  WEFT_WGMMA(SS, "128", WEFT_N0 WEFT_N32, "%64", "%65", "%66", WEFT_F64(d, 0));
}
template <bool kBf16>
__device__ inline void wgmma(float (&d)[32], const unsigned (&a)[4], unsigned b, bool add) {
  WEFT_WGMMA(RS, "64", WEFT_N0, "%32,%33,%34,%35", "%36", "%37", WEFT_F32(d, 0));
}
template <bool kBf16>
__device__ inline void wgmma(float (&d)[64], const unsigned (&a)[4], unsigned b, bool add) {
  WEFT_WGMMA(RS, "128", WEFT_N0 WEFT_N32, "%64,%65,%66,%67", "%68", "%69", WEFT_F64(d, 0));
}
template <bool kBf16>
__device__ inline void wgmma(float (&d)[96], const unsigned (&a)[4], unsigned b, bool add) {
  WEFT_WGMMA(RS, "192", WEFT_N0 WEFT_N32 WEFT_HALF_N64, "%96,%97,%98,%99", "%100", "%101", WEFT_F64(d, 0),
             WEFT_F32(d, 64));
}
template <bool kBf16>
__device__ inline void wgmma(float (&d)[128], const unsigned (&a)[4], unsigned b, bool add) {
  WEFT_WGMMA(RS, "256", WEFT_N0 WEFT_N32 WEFT_N64, "%128,%129,%130,%131", "%132", "%133", WEFT_F64(d, 0),
             WEFT_F64(d, 64));
}

// The same with A and B MN-major.
template <bool kBf16>
__device__ inline void wgmma_ab_mn_major(float (&d)[16], unsigned a, unsigned b, bool add) {
  WEFT_WGMMA(CC, "32", WEFT_HALF_N0, "%16", "%17", "%18", WEFT_F16(d, 0));
}
template <bool kBf16>
__device__ inline void wgmma_ab_mn_major(float (&d)[32], unsigned a, unsigned b, bool add) {
  WEFT_WGMMA(CC, "64", WEFT_N0, "%32", "%33", "%34", WEFT_F32(d, 0));
}
template <bool kBf16>
__device__ inline void wgmma_ab_mn_major(float (&d)[64], unsigned a, unsigned b, bool add) {
  WEFT_WGMMA(CC, "128", WEFT_N0 WEFT_N32, "%64", "%65", "%66", WEFT_F64(d, 0));
}

// The same with A K-major and B MN-major.
template <bool kBf16>
__device__ inline void wgmma_b_mn_major(float (&d)[32], unsigned a, unsigned b, bool add) {
  WEFT_WGMMA(SC, "64", WEFT_N0, "%32", "%33", "%34", WEFT_F32(d, 0));
}
template <bool kBf16>
__device__ inline void wgmma_b_mn_major(float (&d)[64], unsigned a, unsigned b, bool add) {
  WEFT_WGMMA(SC, "128", WEFT_N0 WEFT_N32, "%64", "%65", "%66", WEFT_F64(d, 0));
}
template <bool kBf16>
__device__ inline void wgmma_b_mn_major(float (&d)[96], unsigned a, unsigned b, bool add) {
  WEFT_WGMMA(SC, "192", WEFT_N0 WEFT_N32 WEFT_HALF_N64, "%96", "%97", "%98", WEFT_F64(d, 0), WEFT_F32(d, 64));
}

template <bool kBf16>
__device__ inline void wgmma_b_mn_major(float (&d)[128], unsigned a, unsigned b, bool add) {
  WEFT_WGMMA(SC, "256", WEFT_N0 WEFT_N32 WEFT_N64, "%128", "%129", "%130", WEFT_F64(d, 0), WEFT_F64(d, 64));
}

#undef WEFT_DESCRIPTOR_UPPER
#undef WEFT_WGMMA
#undef WEFT_WGMMA_SS
#undef WEFT_WGMMA_CC
#undef WEFT_WGMMA_SC
#undef WEFT_WGMMA_SHARED
#undef WEFT_WGMMA_RS
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
