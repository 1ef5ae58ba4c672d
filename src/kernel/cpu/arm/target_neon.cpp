// aarch64: every such machine has NEON.
#ifdef __aarch64__

#include "kernel/cpu/arm/neon.h"
#include "kernel/cpu/f32_target.h"

namespace weft::cpu {

const Target& neon_target() {
  static constexpr Target target = f32_target<Neon>("neon", "NEON in f32", [] { return true; });
  return target;
}

}  // namespace weft::cpu

#endif
