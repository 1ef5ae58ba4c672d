// Memory that lives as long as the executor: each slot grows to the largest size asked of it and is used again.
#pragma once

#include <array>
#include <memory_resource>
#include <tuple>
#include <utility>

#include "index.h"
#include "sizes.h"
#include "weft/slice.h"
#include "weft/tensor.h"

namespace weft::run {

enum class Slot {
  keys_0,  // K and V of steps, by turns
  keys_1,
  key_gradients_0,  // dK and dV of steps, by turns
  key_gradients_1,
  own_key_gradients,  // sums of the rank's own dK and dV
  relay_0,            // K and V that a move in two hops brings into the node, by turns
  relay_1,
  relay_gradients_0,  // their dK and dV, summed inside the node
  relay_gradients_1,
  expanded_gradients,  // dK and dV of a step's K and V that were made of a source
  sums,                // partial sums, or dQ
  states,
  step_dq,
  numbers,  // one per head
  // Queries of other ranks (Schedule::query_moves), and partial states of the own rows that come home.
  other_q,
  other_dout,
  other_out,
  other_lse,
  other_dq,
  arrived_sums,
  arrived_states,
  // Tensors once heads have been swapped for sequence: of even head groups, then of odd ones. K and V, and their
  // gradients, stay for the head groups that share them, and take turns otherwise.
  swap_kv_0,
  swap_kv_1,
  swap_key_gradients_0,
  swap_key_gradients_1,
  swap_more_gradients,  // of a head group, to be added to those of the ones before it that share its keys
  swap_q_0,
  swap_q_1,
  swap_out_0,
  swap_out_1,
  swap_lse_0,
  swap_lse_1,
  swap_dout_0,
  swap_dout_1,
  swap_dq_0,
  swap_dq_1,
  count,
};

// The slot itself, or the one after it.
constexpr Slot by_turn(Slot even, Index n) { return static_cast<Slot>(static_cast<Index>(even) + n % 2); }

class Workspace {
  struct Buffer {
    void* data = nullptr;
    Index size = 0;
  };

 public:
  explicit Workspace(std::pmr::memory_resource* memory)
      : memory_(memory != nullptr ? memory : std::pmr::new_delete_resource()) {}
  ~Workspace() {
    for (Buffer& buffer : buffers_) release(buffer);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // At least so many bytes; the slot's contents are lost if it grows.
  void* bytes(Slot slot, Index size) {
    Buffer& buffer = buffers_[static_cast<std::size_t>(slot)];
    if (buffer.size < size) {
      release(buffer);
      buffer.data = memory_->allocate(at(size), kAlignment);
      buffer.size = size;
    }
    return buffer.data;
  }

  // In the capture of a graph: while it lives all slots are taken anew, and its end gives them back, so that the graph
  // shares no memory with calls outside of it.
  class Apart {
   public:
    Apart(Workspace& of, bool captured) : of_(of), captured_(captured) {
      if (captured_) std::swap(kept_, of_.buffers_);
    }
    ~Apart() {
      if (!captured_) return;
      for (Buffer& buffer : of_.buffers_) of_.release(buffer);
      std::swap(kept_, of_.buffers_);
    }
    Apart(const Apart&) = delete;
    Apart& operator=(const Apart&) = delete;

   private:
    Workspace& of_;
    bool captured_;
    std::array<Buffer, static_cast<std::size_t>(Slot::count)> kept_;
  };

  Index held() const {
    Index total = 0;
    for (const Buffer& buffer : buffers_) total += buffer.size;
    return total;
  }

 private:
  static constexpr std::size_t kAlignment = 64;

  void release(Buffer& buffer) {
    if (buffer.data != nullptr) memory_->deallocate(buffer.data, at(buffer.size), kAlignment);
    buffer = {};
  }

  std::pmr::memory_resource* memory_;
  std::array<Buffer, static_cast<std::size_t>(Slot::count)> buffers_;
};

// K and V (or their gradients) of the same rows.
template <class View>
struct KvOf {
  View k = {}, v = {};

  std::tuple<View, View> both() const { return {k, v}; }
};
using Kv = KvOf<TensorView>;
using ConstKv = KvOf<ConstTensorView>;

struct KvShape {
  Index rows = 0, heads = 0, dim_qk = 0, dim_v = 0;
  DType dtype = DType::f32;
};

// So many rows and heads, with the dims and the dtype of `kv`.
template <class View>
KvShape shape_like(const KvOf<View>& kv, Index rows, Index heads) {
  return {rows, heads, kv.k.dim, kv.v.dim, kv.k.dtype};
}

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

// As head_range, but an empty range is allowed.
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
