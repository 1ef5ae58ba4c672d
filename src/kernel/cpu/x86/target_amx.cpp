// x86 with AMX (Sapphire Rapids and later): bf16 by tiles, f32 and f16 as AVX-512 does. Compiled with the flags of
// both: nothing here may be called before runs_here().
#ifdef __x86_64__

#include <sys/syscall.h>
#include <unistd.h>

#include "kernel/cpu/x86/amx.h"
#include "kernel/cpu/x86/features.h"
#include "kernel/cpu/x86/tile_target.h"

namespace weft::cpu {
namespace {

// Linux lets a process use tiles only after it has asked, once for all of its threads; before 5.16 it never does.
bool may_use_tiles() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

bool has_amx() {
  if (!has_amx_bf16()) return false;
  static const bool may = may_use_tiles();
  return may;
}

}  // namespace

const Target& amx_target() {
  static constexpr Target target = tile_target<AmxTiles>("amx", "AVX-512; bf16 by the tiles of AMX", &has_amx);
  return target;
}

}  // namespace weft::cpu

#endif
