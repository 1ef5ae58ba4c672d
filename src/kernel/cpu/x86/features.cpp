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

}  // namespace

bool has_avx2() {
  constexpr int kFma = 12, kF16c = 29, kAvx2 = 5;
  return has(leaf(1).c, kFma) && has(leaf(1).c, kF16c) && has(leaf(7).b, kAvx2) && saves(kAvx);
}

bool has_avx512() {
  constexpr int kF = 16, kDq = 17, kBw = 30, kVl = 31;
  const unsigned flags = leaf(7).b;
  return has_avx2() && has(flags, kF) && has(flags, kDq) && has(flags, kBw) && has(flags, kVl) && saves(kAvx512);
}

bool has_avx512_bf16() {
  constexpr int kBf16 = 5;
  return has_avx512() && has(leaf(7, 1).a, kBf16);
}

bool has_amx_bf16() {
  constexpr int kBf16 = 22, kTile = 24;
  const unsigned flags = leaf(7).d;
  return has_avx512_bf16() && has(flags, kBf16) && has(flags, kTile) && saves(kTiles);
}

}  // namespace weft::cpu

#endif
