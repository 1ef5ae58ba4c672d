// Memory that lives as long as the executor: each slot grows to the largest size asked of it and is used again.
#pragma once

#include <array>
#include <memory_resource>

#include "index.h"
#include "sizes.h"
#include "weft/slice.h"
#include "weft/tensor.h"

namespace weft::run {

enum class Slot {
  keys_0,  // K and V of even and odd steps
  keys_1,
  key_gradients_0,  // dK and dV of even and odd steps
  key_gradients_1,
  own_key_gradients,  // sums of the rank's own dK and dV
  sums,               // partial sums, or dQ
  states,
  step_dq,
  numbers,  // one a head
  swap_kv,  // tensors once heads have been swapped for sequence
  swap_key_gradients,
  swap_q,
  swap_out,
  swap_lse,
  swap_dout,
  swap_dq,
  count,
};

class Workspace {
 public:
  explicit Workspace(std::pmr::memory_resource* memory)
      : memory_(memory != nullptr ? memory : std::pmr::new_delete_resource()) {}
  ~Workspace() {
    for (Part& part : parts_) release(part);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // What was in the slot before is lost.
  void* bytes(Slot slot, Index size) {
    Part& part = parts_[static_cast<std::size_t>(slot)];
    if (part.size < size) {
      release(part);
      part.data = memory_->allocate(at(size), kAlignment);
      part.size = size;
    }
    return part.data;
  }

  Index held() const {
    Index total = 0;
    for (const Part& part : parts_) total += part.size;
    return total;
  }

 private:
  static constexpr std::size_t kAlignment = 64;
  struct Part {
    void* data = nullptr;
    Index size = 0;
  };

  void release(Part& part) {
    if (part.data != nullptr) memory_->deallocate(part.data, at(part.size), kAlignment);
    part = {};
  }

  std::pmr::memory_resource* memory_;
  std::array<Part, static_cast<std::size_t>(Slot::count)> parts_;
};

// K and V (or their gradients) of the same rows.
template <class View>
struct KvOf {
  View k = {}, v = {};
};
using Kv = KvOf<TensorView>;
using ConstKv = KvOf<ConstTensorView>;

struct KvShape {
  Index rows = 0, heads = 0, dim_qk = 0, dim_v = 0;
  DType dtype = DType::f32;
};

// Both contiguous [rows, heads, dim], in one slot.
inline Kv take_kv(Workspace& workspace, Slot slot, const KvShape& shape) {
  constexpr Index kLine = 64;
  const auto bytes = [&](Index dim) {
    return checked_product("a workspace of K and V", {shape.rows, shape.heads, dim, size_of(shape.dtype)});
  };
  const Index k_bytes = (bytes(shape.dim_qk) + kLine - 1) / kLine * kLine, v_bytes = bytes(shape.dim_v);
  char* data = static_cast<char*>(workspace.bytes(slot, k_bytes + v_bytes + kLine));  // never null
  return {thd(static_cast<void*>(data), shape.dtype, shape.rows, shape.heads, shape.dim_qk),
          thd(static_cast<void*>(data + k_bytes), shape.dtype, shape.rows, shape.heads, shape.dim_v)};
}

// As head_range, but none is a number of heads too.
template <class Void>
BasicTensorView<Void> some_heads(BasicTensorView<Void> view, Range heads) {
  if (heads.size() > 0) return head_range(view, heads.begin, heads.size());
  view.heads = 0;
  return view;
}

template <class View>
KvOf<View> heads_of(const KvOf<View>& kv, Range heads) {
  return {some_heads(kv.k, heads), some_heads(kv.v, heads)};
}

}  // namespace weft::run
