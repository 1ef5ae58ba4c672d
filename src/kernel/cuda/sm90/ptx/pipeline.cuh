// The position in a pipeline of shared memory stages, and typed loads and stores of shared memory.
#pragma once

namespace weft::cuda::sm90 {

// The current stage, and the phase bit of its mbarriers, which flips each time the pipeline wraps around.
template <int kStages>
struct PipelineState {
  int index = 0;
  unsigned phase = 0;
  __device__ void advance() {
    if (++index == kStages) {
      index = 0;
      phase ^= 1;
    }
  }
};

__device__ inline int ld_shared_s32(unsigned address) {
  int x;
  asm volatile("ld.shared.s32 %0, [%1];\n" : "=r"(x) : "r"(address));
  return x;
}
__device__ inline void st_shared_s32(unsigned address, int x) {
  asm volatile("st.shared.s32 [%0], %1;\n" ::"r"(address), "r"(x) : "memory");
}
__device__ inline void st_shared_v2_s32(unsigned address, int a, int b) {
  asm volatile("st.shared.v2.s32 [%0], {%1,%2};\n" ::"r"(address), "r"(a), "r"(b) : "memory");
}
__device__ inline int2 ld_shared_v2_s32(unsigned address) {
  int2 x;
  asm volatile("ld.shared.v2.s32 {%0,%1}, [%2];\n" : "=r"(x.x), "=r"(x.y) : "r"(address));
  return x;
}
__device__ inline void st_shared_v4_s32(unsigned address, int a, int b, int c, int d) {
  asm volatile("st.shared.v4.s32 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

}  // namespace weft::cuda::sm90
