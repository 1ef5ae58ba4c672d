// Division by a divisor that is known on the host.
#pragma once

#include <cuda_runtime.h>

namespace weft {

// q = n / d for n < 2^31 (round-up method of Granlund and Montgomery).
struct FastDivisor {
  unsigned multiplier, shift, divisor;

  explicit FastDivisor(unsigned d) : shift(0), divisor(d) {
    while ((1ull << shift) < d) ++shift;
    multiplier = static_cast<unsigned>(((1ull << 32) * ((1ull << shift) - d)) / d + 1);
  }
  __device__ unsigned divide(unsigned n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

}  // namespace weft
