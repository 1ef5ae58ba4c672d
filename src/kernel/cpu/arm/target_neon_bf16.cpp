// aarch64 with BFMMLA: bf16 by matrix instructions, f32 and f16 as NEON does. Compiled with +bf16: nothing here may be
// called before runs_here().
#ifdef __aarch64__

#include <sys/auxv.h>

#include "kernel/cpu/arm/neon.h"
#include "kernel/cpu/bf16_backward.h"
#include "kernel/cpu/bf16_forward.h"
#include "kernel/cpu/f32_target.h"

namespace weft::cpu {
namespace {

bool has_bfmmla() {
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16
  return (getauxval(AT_HWCAP2) & kBf16) != 0;
}

}  // namespace

const Target& neon_bf16_target() {
  static constexpr Target target =
      bf16_target<Bf16Forward, Bf16Backward, neon_target>("neon_bf16", "NEON; bf16 by BFMMLA", &has_bfmmla);
  return target;
}

}  // namespace weft::cpu

#endif
