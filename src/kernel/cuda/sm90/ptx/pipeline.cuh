// Places in rings of buffers, and words of shared memory that warps leave for each other.
#pragma once

namespace weft::cuda::sm90 {

// A place in a ring of buffers, and the parity of its barriers.
template <int kSize>
struct Ring {
  int at = 0;
  unsigned parity = 0;
  __device__ void next() {
    if (++at == kSize) {
      at = 0;
      parity ^= 1;
    }
  }
};

__device__ inline int read_word(unsigned at) {
  int word;
  asm volatile("ld.shared.s32 %0, [%1];\n" : "=r"(word) : "r"(at));
  return word;
}
__device__ inline void write_word(unsigned at, int x) {
  asm volatile("st.shared.s32 [%0], %1;\n" ::"r"(at), "r"(x) : "memory");
}
__device__ inline void write_two(unsigned at, int a, int b) {
  asm volatile("st.shared.v2.s32 [%0], {%1,%2};\n" ::"r"(at), "r"(a), "r"(b) : "memory");
}
__device__ inline int2 read_two(unsigned at) {
  int2 x;
  asm volatile("ld.shared.v2.s32 {%0,%1}, [%2];\n" : "=r"(x.x), "=r"(x.y) : "r"(at));
  return x;
}
__device__ inline void write_four(unsigned at, int a, int b, int c, int d) {
  asm volatile("st.shared.v4.s32 [%0], {%1,%2,%3,%4};\n" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

}  // namespace weft::cuda::sm90
