// x86 with AVX-512 F, BW, DQ, VL. Compiled with those flags: nothing here may be called before runs_here().
#ifdef __x86_64__

#include "kernel/cpu/f32_target.h"
#include "kernel/cpu/x86/avx512.h"

namespace weft::cpu {

const Target& avx512_target() {
  static constexpr Target target = f32_target<Avx512>("avx512", "AVX-512 in f32", &has_avx512);
  return target;
}

}  // namespace weft::cpu

#endif
