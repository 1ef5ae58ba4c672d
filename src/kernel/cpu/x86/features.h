// The instruction sets that a program may use here: the processor has them, and the system saves their registers.
#pragma once

namespace weft::cpu {

bool has_avx2();         // with FMA and the conversions of f16
bool has_avx512();       // F, BW, DQ and VL
bool has_avx512_bf16();  // with all of AVX-512 above
bool has_amx_bf16();     // with AVX512-BF16; a process has to ask Linux for the tiles as well

}  // namespace weft::cpu
