// Seconds of a rank's kernels and passes over rows, and bytes of its memory.
#pragma once

#include <span>
#include <vector>

#include "cost/outline.h"
#include "cost/tiles.h"
#include "weft/state.h"

namespace weft::cost {

// A rank's tensors as its steps see them.
struct Frame {
  Index ranks = 1, ulysses = 1;
  Index q_rows = 0, k_rows = 0;    // of the rank's own tensors
  Index heads_q = 1, heads_k = 1;  // of the rank's own tensors
  Index step_heads_q = 1, step_heads_k = 1;
  bool swaps = false;

  Index step_q_rows() const { return q_rows * ulysses; }
};
Frame frame_of(const Schedule& schedule);

struct StepFrame {
  Index key_rows = 0, heads_q = 0, heads_k = 0;
  bool moves = false;
  std::optional<Index> relay_rows = {};  // of a move in two hops
};

class Costs {
 public:
  Costs(const Machine& machine, const TensorShape& shape, Pass pass)
      : machine_(machine), shape_(shape), pass_(pass), rate_(kernel_rate(machine, pass, shape)) {}

  const KernelRate& rate() const { return rate_; }
  Index dims() const { return shape_.dim_qk + shape_.dim_v; }
  double kv_bytes() const { return static_cast<double>(dims() * size_of(shape_.dtype)); }  // a row and head of K and V
  double gradient_bytes() const { return static_cast<double>(dims() * sum_size()); }

  // `first`: the rank's first step that computes; `partial`: it has several of the same heads.
  Work work(Index rank, const Frame& frame, const StepFrame& step, const TileWork& tiles, bool partial,
            bool first) const;
  double begin_rows(const Frame& frame, bool first_moves) const;
  double end_rows(const Frame& frame, bool partial) const;
  RankMemory memory(const Frame& frame, std::span<const StepFrame> steps, bool partial) const;

  // Bytes of a row and head: what is swapped as queries and as keys, on the way in and on the way back.
  struct SwapBytes {
    Index q = 0, k = 0;
  };
  SwapBytes swap_in() const;
  SwapBytes swap_out() const;
  SwapBytes swap_gradients() const { return {0, dims() * sum_size()}; }  // of K and V, on their way home

 private:
  double pass_over(double bytes) const {
    return machine_.row_seconds + (machine_.row_bandwidth > 0 ? bytes / machine_.row_bandwidth : 0);
  }
  DType sums() const { return sum_type(shape_.dtype); }  // what partial sums and gradients are kept in
  Index sum_size() const { return size_of(sums()); }
  Index state_size() const {
    return static_cast<Index>(sums() == DType::f64 ? sizeof(RowState<double>) : sizeof(RowState<float>));
  }
  Index size(std::optional<DType> dtype) const { return size_of(dtype.value_or(shape_.dtype)); }

  const Machine& machine_;
  const TensorShape& shape_;
  Pass pass_;
  const KernelRate& rate_;
};

// Bytes that each member of a group gets from every other one, by member.
std::vector<double> swapped_bytes(const Schedule& schedule, const Costs::SwapBytes& bytes);

}  // namespace weft::cost
