// What kernels of bf16 share whose products are matrix instructions: rows of 16-bit numbers, and logits from products.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernel/cpu/elementwise.h"
#include "kernel/cpu/micro.h"
#include "weft/tensor.h"

namespace weft::cpu {
namespace {

using Bits = std::uint16_t;  // of a bf16

// Pointers to rows of `wide` columns: the tensor's own where its width fits, copies padded with zeros where not.
class RowPointers {
 public:
  RowPointers(Bits* copies, Index wide) : copies_(copies), wide_(wide) {}
  const Bits* row(const ConstTensorView& view, Index row, Index head, Index slot) {
    const auto* from = reinterpret_cast<const Bits*>(view.at<bf16>(row, head));
    if (view.dim == wide_) return from;
    Bits* to = copies_ + slot * wide_;
    for (Index i = 0; i < wide_; ++i) to[i] = i < view.dim ? from[i] : Bits{0};
    return to;
  }

 private:
  Bits* copies_;
  Index wide_;
};

// From products q·k to logits in units of log 2. A plain positive scale waits for the fused step before exp2 (`late`);
// a softcap, or a negative scale, which would turn -inf into +inf, is applied before the mask.
struct BlockLogits {
  BlockLogits(float scale, float softcap)
      : early(softcap > 0 ? scale / softcap
              : scale > 0 ? 1.0f
                          : scale * kLog2E),
        late(softcap > 0 || !(scale > 0) ? 1.0f : scale * kLog2E),
        size(softcap * kLog2E) {}

  template <class S>
  void scale_early(float* begin, float* end) const {
    if (size == 0 && early == 1.0f) return;
    for (float* at = begin; at < end; at += S::kLanes) {
      const typename S::V x = S::mul(S::load(at), S::all(early));
      S::store(at, size > 0 ? S::mul(tanh<S>(x), S::all(size)) : x);
    }
  }

  float early, late, size;  // size: of the softcap, in units of log 2
};

}  // namespace
}  // namespace weft::cpu
