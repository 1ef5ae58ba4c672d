// aarch64 with BFMMLA: bf16 by matrix instructions, f32 and f16 as NEON does. Compiled with +bf16: nothing here may be
// called before runs_here().
#ifdef __aarch64__

#include <sys/auxv.h>

#include "kernel/cpu/bf16_backward.h"
#include "kernel/cpu/bf16_forward.h"
#include "kernel/cpu/f32_target.h"
#include "kernel/cpu/neon.h"

namespace weft::cpu {
namespace {

using Forward = F32Forward<Neon>;
using Backward = F32Backward<Neon>;

bool in_bf16(const ForwardCall& call) { return call.args.q.dtype == DType::bf16; }
// dout may be of another dtype, which rounding to bf16 would not do justice.
bool in_bf16(const BackwardCall& call) {
  return call.args.q.dtype == DType::bf16 && call.args.dout.dtype == DType::bf16;
}

constexpr Target make_target() {
  Target t = f32_target<Neon>("neon_bf16", "NEON; bf16 by BFMMLA", [] {
    constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16
    return (getauxval(AT_HWCAP2) & kBf16) != 0;
  });
  t.tile_rows = [](const ForwardCall& call, Index group) {
    return in_bf16(call) ? Bf16Forward::tile_rows(call, group) : Forward::tile_rows(call, group);
  };
  t.forward_scratch = [](const ForwardCall& call, Index rows) {
    return in_bf16(call) ? Bf16Forward::scratch(call, rows) : Forward::scratch(call, rows);
  };
  t.forward_tile = [](const ForwardCall& call, const ForwardTile& tile) {
    in_bf16(call) ? Bf16Forward::tile(call, tile) : Forward::tile(call, tile);
  };
  t.block_rows = [](const BackwardCall& call, Index group) {
    return in_bf16(call) ? Bf16Backward::block_rows(call, group) : Backward::block_rows(call, group);
  };
  t.backward_scratch = [](const BackwardCall& call, Index rows) {
    return in_bf16(call) ? Bf16Backward::scratch(call, rows) : Backward::scratch(call, rows);
  };
  t.backward_part = [](const BackwardCall& call, const BackwardPart& part) {
    in_bf16(call) ? Bf16Backward::part(call, part) : Backward::part(call, part);
  };
  return t;
}

}  // namespace

const Target& neon_bf16_target() {
  static constexpr Target target = make_target();
  return target;
}

}  // namespace weft::cpu

#endif
