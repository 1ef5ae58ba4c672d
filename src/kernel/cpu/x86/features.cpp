// By CPUID: __builtin_cpu_supports reads a variable of the compiler's runtime library, which the one that wheels are
// built with (zig's) does not have.
#ifdef __x86_64__

#include "kernel/cpu/x86/features.h"

#include <cpuid.h>

namespace weft::cpu {
namespace {

struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
};
// Zeros if the processor has no such leaf.
Leaf leaf(unsigned number, unsigned part = 0) {
  Leaf l;
  __get_cpuid_count(number, part, &l.a, &l.b, &l.c, &l.d);
  return l;
}
constexpr bool has(unsigned flags, int bit) { return (flags >> bit & 1) != 0; }

// XCR0: a bit for each set of registers that the system saves.
constexpr unsigned kAvx = 0x6, kAvx512 = kAvx | 0xe0, kTiles = 0x60000;
bool saves(unsigned registers) {
  if (!has(leaf(1).c, 27)) return false;  // OSXSAVE: XGETBV can be executed
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & registers) == registers;
}

struct Features {
  bool avx2 = false, avx512 = false, avx512_bf16 = false, amx_bf16 = false;
};

Features ask() {
  constexpr int kFma = 12, kF16c = 29, kAvx2 = 5;               // leaf 1 c, 7 b
  constexpr int kF = 16, kDq = 17, kBw = 30, kVl = 31;          // leaf 7 b
  constexpr int kAvx512Bf16 = 5, kAmxBf16 = 22, kAmxTile = 24;  // leaf 7.1 a, 7 d
  const Leaf one = leaf(1), seven = leaf(7);
  Features f;
  f.avx2 = has(one.c, kFma) && has(one.c, kF16c) && has(seven.b, kAvx2) && saves(kAvx);
  f.avx512 =
      f.avx2 && has(seven.b, kF) && has(seven.b, kDq) && has(seven.b, kBw) && has(seven.b, kVl) && saves(kAvx512);
  f.avx512_bf16 = f.avx512 && has(leaf(7, 1).a, kAvx512Bf16);
  f.amx_bf16 = f.avx512_bf16 && has(seven.d, kAmxBf16) && has(seven.d, kAmxTile) && saves(kTiles);
  return f;
}

// Asked once: in a virtual machine each CPUID is a VM exit, and kernels are chosen in each call.
const Features& features() {
  static const Features once = ask();
  return once;
}

}  // namespace

bool has_avx2() { return features().avx2; }
bool has_avx512() { return features().avx512; }
bool has_avx512_bf16() { return features().avx512_bf16; }
bool has_amx_bf16() { return features().amx_bf16; }

}  // namespace weft::cpu

#endif
